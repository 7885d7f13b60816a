package pagesets

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/units"
)

// A Recall says how well the sketch index finds bases: pages of a sibling that the
// cohort has not seen are encoded with the base that the index names, and with each base
// there is.
type Recall struct {
	Pages      int `json:"pages"`       // probed
	Bases      int `json:"bases"`       // pool entries that may be a base
	None       int `json:"none"`        // bytes of all pages without similar bases
	Index      int `json:"index"`       // with the base that the index finds
	Brute      int `json:"brute"`       // with the best base of the pool
	BrutePool  int `json:"brute_found"` // pages whose best base the index found, or one within a tenth
	Better     int `json:"better"`      // pages that some base of the pool makes smaller by a tenth
	PublicToo  int `json:"public"`      // bytes with the best base of pool, template and root image, over the first of the pages
	PublicOf   int `json:"public_pages"`
	IndexFirst int `json:"index_first"` // Index over those pages
}

// Gain is the part of the attainable saving that the index gets.
func (r Recall) Gain() float64 {
	if r.None == r.Brute {
		return 1
	}
	return float64(r.None-r.Index) / float64(r.None-r.Brute)
}

// Recall measures the index on n pages of the last sibling, after the others were replayed; on
// publicPages of them also against every public page, which takes a second a page.
func (s *Set) Recall(ctx context.Context, n, publicPages int) (_ *Recall, err error) {
	row, _ := RowNamed(RowAll)
	last := len(s.Info().Siblings) - 1
	if last < 1 {
		return nil, errors.New("measure recall: the capture has one sibling only")
	}
	r := &replay{set: s, row: row, res: &Result{}}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.open(last + 1); err != nil {
		return nil, err
	}
	held := r.boxes[last]
	err = s.capture.Gaps(func(g capture.Gap) error {
		if g.Sibling != last {
			return errors.Join(ctx.Err(), r.gap(ctx, g))
		}
		held.gaps++
		for _, c := range g.Changed {
			*held.page(c.Frame) = *c.Page
			held.pages[c.Frame] = kept{}
		}
		for _, f := range g.Gone {
			delete(held.pages, f)
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("measure recall: %w", err)
	}
	return r.recall(ctx, held, n, publicPages)
}

func (r *replay) recall(ctx context.Context, held *box, n, publicPages int) (*Recall, error) {
	bases := r.bases()
	res := &Recall{Bases: len(bases)}
	e := codec.NewEncoder(codec.Options{})
	defer e.Close()
	for _, f := range r.probes(held, n) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		page := held.page(f)
		none := r.probe(f, page, cohort.Ways(cohort.WaySimilar))
		index := r.probe(f, page, 0)
		best := none
		for _, b := range bases {
			if enc, ok := e.BlockBase(page, b); ok {
				best = min(best, len(enc.Data))
			}
		}
		res.Pages++
		res.None += none
		res.Index += index
		res.Brute += min(best, index)
		if best*10 < none*9 {
			res.Better++
			if index*10 <= best*11 {
				res.BrutePool++
			}
		}
		if res.PublicOf < publicPages {
			res.PublicOf++
			res.IndexFirst += index
			res.PublicToo += min(best, index, r.bestPublic(e, page, best))
		}
	}
	return res, nil
}

// probe returns the bytes that a page would take.
func (r *replay) probe(f units.Frame, page *units.Page, without cohort.WaySet) int {
	way, n := r.cohort.Probe(r.worker, f, page, without)
	if way == 0 {
		return units.PageSize
	}
	return n
}

// bestPublic is the shortest block of page against any public page.
func (r *replay) bestPublic(e *codec.Encoder, page *units.Page, best int) int {
	var base units.Page
	r.set.library.All(func(id library.ID, _ uint32) bool {
		if r.set.library.Read(&base, id) == nil {
			if enc, ok := e.BlockBase(page, &base); ok {
				best = min(best, len(enc.Data))
			}
		}
		return true
	})
	return best
}

// bases returns the pages of all entries that may be a base, each once.
func (r *replay) bases() []*units.Page {
	seen := map[cohort.Ref]bool{}
	var out []*units.Page
	for _, b := range r.boxes {
		for f, k := range b.pages {
			if k.ref == 0 || k.ref.Public() || seen[k.ref] {
				continue
			}
			seen[k.ref] = true
			if way, size, err := r.cohort.Way(r.worker, k.ref); err == nil && !codec.Kind(way).HasBase() && size >= leastBase {
				out = append(out, b.page(f))
			}
		}
	}
	return out
}

// leastBase is the shortest entry that is taken for a base here, as in the cohort.
const leastBase = 128

// probes picks n pages that only an encoding can make small: not public, not a sibling's.
func (r *replay) probes(held *box, n int) []units.Frame {
	siblings := map[uint32]bool{}
	for _, b := range r.boxes {
		for f := range b.pages {
			if b != held {
				siblings[codec.Checksum(b.page(f))] = true
			}
		}
	}
	var all []units.Frame
	e := codec.NewEncoder(codec.Options{})
	defer e.Close()
	for f := range held.pages {
		page, template := held.page(f), r.set.image.Page(f)
		if codec.IsZero(page) || template != nil && *page == *template {
			continue
		}
		sum := codec.Checksum(page)
		if _, public := r.set.library.Find(page, sum); public || siblings[sum] {
			continue
		}
		if enc, ok := e.Encode(page, template, nil); !ok || len(enc.Data) > 64 {
			all = append(all, f)
		}
	}
	rand.New(rand.NewPCG(2, 2)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(n, len(all))]
}
