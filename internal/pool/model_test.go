package pool

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// modelEntry is what a plain map knows of an entry.
type modelEntry struct {
	kind codec.Kind
	dict codec.DictID
	sum  uint32
	data []byte
	refs int
}

func TestPoolIsAMapWithReferences(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]units.Bytes{200 * units.KiB, 1 * units.MiB, 0}).Draw(t, "limit")
		p, err := New(Options{Limit: limit})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		model := map[Handle]*modelEntry{}
		var order []Handle // of the model's keys, so that draws repeat
		pick := func(t *rapid.T) (int, Handle) {
			if len(order) == 0 {
				t.Skip("empty")
			}
			i := rapid.IntRange(0, len(order)-1).Draw(t, "which")
			return i, order[i]
		}
		putOne := func(t *rapid.T) {
			e := &modelEntry{
				kind: codec.Kind(rapid.IntRange(1, 4).Draw(t, "kind")),
				sum:  rapid.Uint32().Draw(t, "sum"),
				data: bytes.Repeat([]byte{rapid.Byte().Draw(t, "byte")}, rapid.OneOf(rapid.IntRange(0, 80), rapid.IntRange(0, codec.MaxData)).Draw(t, "length")),
				refs: 1,
			}
			if e.kind == codec.KindZstdDict {
				e.dict = codec.DictID(rapid.Uint32().Draw(t, "dict"))
			}
			h, err := p.Put(codec.Encoded{Kind: e.kind, Dict: e.dict, Sum: e.sum, Data: e.data})
			switch {
			case errors.Is(err, ErrFull) && limit != 0:
				return
			case err != nil:
				t.Fatal(err)
			case model[h] != nil:
				t.Fatalf("handle %#x is in use", h)
			}
			model[h] = e
			order = append(order, h)
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": putOne,
			"put many": func(t *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(t, "n") {
					putOne(t)
				}
			},
			"ref": func(t *rapid.T) {
				_, h := pick(t)
				p.Ref(h)
				model[h].refs++
			},
			"release": func(t *rapid.T) {
				i, h := pick(t)
				e := model[h]
				freed, dict := p.Release(h)
				e.refs--
				if freed != (e.refs == 0) || freed && dict != e.dict {
					t.Fatalf("release with %d references left: freed %v, dictionary %d (want %d)", e.refs, freed, dict, e.dict)
				}
				if freed {
					delete(model, h)
					order[i] = order[len(order)-1]
					order = order[:len(order)-1]
				}
			},
			"trim": func(*rapid.T) { p.Trim() },
			"": func(t *rapid.T) {
				var live units.Bytes
				for h, e := range model {
					v := p.View(h)
					if v.Kind != e.kind || v.Dict != e.dict || v.Sum != e.sum || !bytes.Equal(v.Data, e.data) {
						t.Fatalf("entry %#x differs from the model", h)
					}
					live += units.Bytes(len(e.data))
				}
				s := p.Stats()
				kernel, err := hostmem.Allocated(p.file)
				if err != nil {
					t.Fatal(err)
				}
				if s.Entries != int64(len(model)) || s.Live != live || s.Resident != kernel {
					t.Fatalf("%d entries of %d bytes in %d, stats say %+v", len(model), live, kernel, s)
				}
				if s.Live+s.Meta+s.Slack != s.Footprint || s.Slack < 0 || limit != 0 && s.Footprint > limit {
					t.Fatalf("accounts do not add up or exceed %v: %+v", limit, s)
				}
			},
		})
	})
}
