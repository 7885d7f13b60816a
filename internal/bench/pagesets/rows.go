package pagesets

import (
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// A Row is one way to keep all pages.
type Row struct {
	Name string // a word or two, for the table
	Note string // what it is, in a sentence

	without   cohort.WaySet
	isolation cohort.Isolation
	template  bool // a page that equals the template's page of its frame costs nothing
	noCost    bool // sizes alone decide, decode time does not
	dictSize  int
	atStake   func() units.Bytes
	flat      func() *flat
}

// Names of the rows that callers ask for.
const (
	RowAll   = "agentzip"
	RowPaper = "paper"
	RowZswap = "zswap-zstd"
)

// always lets a dictionary be adopted whatever it saves: rows that are about dictionaries
// must have one.
func always() units.Bytes { return units.GiB }

// only returns all ways but these, for Options.Without.
func only(ways ...cohort.Way) cohort.WaySet {
	all := cohort.Ways(cohort.WayRLE, cohort.WayDelta, cohort.WayZstd, cohort.WayDict, cohort.WayBase, cohort.WayPublic, cohort.WayShared, cohort.WaySimilar)
	return all &^ cohort.Ways(ways...)
}

// Rows returns all rows in the order of the table: what others do, each encoder alone, the
// paper's three, each addition on top of the one before, and the whole with one part off.
func Rows() []Row {
	const (
		rle, delta, plain, dict = cohort.WayRLE, cohort.WayDelta, cohort.WayZstd, cohort.WayDict
		base, public, shared    = cohort.WayBase, cohort.WayPublic, cohort.WayShared
		similar                 = cohort.WaySimilar
	)
	return []Row{
		{Name: RowZswap, Note: "each page by itself with zstd level 3, 64 B of entry, pages of one repeated word free", flat: zswap},
		{Name: "lz4", Note: "the same with LZ4", flat: lz4Each},
		{Name: "rle", Note: "run lengths alone", without: only(rle)},
		{Name: "delta", Note: "runs against the template's page of the frame alone (zeros where it has none)", template: true, flat: deltaEach},
		{Name: "zstd", Note: "a block for each page, in the pool", without: only(plain)},
		{Name: "dictionary", Note: "blocks with a dictionary trained on the siblings", without: only(plain, dict), atStake: always},
		{Name: "public", Note: "references to equal pages of template and root image alone", template: true, without: only(public)},
		{Name: RowPaper, Note: "the paper's three: run lengths, delta, dictionary; the best for each page", template: true, without: only(rle, delta, plain, dict), atStake: always},
		{Name: "+public", Note: "and references to public pages", template: true, without: only(rle, delta, plain, dict, public), atStake: always},
		{Name: "+shared", Note: "and to equal pages of siblings", template: true, without: only(rle, delta, plain, dict, public, shared), atStake: always},
		{Name: "+base", Note: "and blocks with the template's page as base", template: true, without: only(rle, delta, plain, dict, public, shared, base), atStake: always},
		{Name: "+similar", Note: "and similar pages of siblings as base", template: true, atStake: always},
		{Name: RowAll, Note: "all that, and a dictionary only where it pays for itself: the product", template: true},
		{Name: "-cost", Note: "without the rule of cost: the smallest encoding always", template: true, noCost: true},
		{Name: "-public", Note: "without references to public pages", template: true, without: cohort.Ways(public)},
		{Name: "-shared", Note: "without references to equal pages", template: true, without: cohort.Ways(shared)},
		{Name: "-similar", Note: "without similar pages as base", template: true, without: cohort.Ways(similar)},
		{Name: "dict-16k", Note: "with a dictionary of 16 KiB, whatever it costs", template: true, dictSize: 16 << 10, atStake: always},
		{Name: "strict", Note: "isolation=strict: nothing of siblings, only the template", template: true, isolation: cohort.Strict},
	}
}

// RowNamed returns the row of that name.
func RowNamed(name string) (Row, bool) {
	for _, r := range Rows() {
		if r.Name == name {
			return r, true
		}
	}
	return Row{}, false
}

// flat keeps each page for itself, without a pool: what it occupies is all there is.
type flat struct {
	encode func(page, template *units.Page) int
	close  func()
}

// zswapEntry is what the kernel keeps for each page in zswap beside its bytes: struct
// zswap_entry is 56 B and comes from a slab of 64 (mm/zswap.c).
const zswapEntry = 64

// sameFilled reports whether a page is one word over and over: zram and zswap keep the word
// only.
func sameFilled(page *units.Page) bool {
	for i := 8; i < units.PageSize; i++ {
		if page[i] != page[i-8] {
			return false
		}
	}
	return true
}

func zswap() *flat {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(3)), zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err) // the options are constants
	}
	buf := make([]byte, 0, 2*units.PageSize)
	return &flat{
		encode: func(page, _ *units.Page) int {
			if sameFilled(page) {
				return zswapEntry
			}
			return min(len(enc.EncodeAll(page[:], buf)), units.PageSize) + zswapEntry
		},
		close: func() { _ = enc.Close() },
	}
}

func lz4Each() *flat {
	var c lz4.Compressor
	buf := make([]byte, lz4.CompressBlockBound(units.PageSize))
	return &flat{
		encode: func(page, _ *units.Page) int {
			if sameFilled(page) {
				return zswapEntry
			}
			n, err := c.CompressBlock(page[:], buf)
			if err != nil || n == 0 {
				n = units.PageSize
			}
			return n + zswapEntry
		},
		close: func() {},
	}
}

func deltaEach() *flat {
	e := codec.NewEncoder(codec.Options{})
	return &flat{
		encode: func(page, template *units.Page) int {
			if enc, ok := e.Runs(page, template, e.Limit()); ok {
				return len(enc.Data) + deltaEntry
			}
			return units.PageSize
		},
		close: e.Close,
	}
}

// deltaEntry is what a pool entry has beside its bytes: header, handle and index.
const deltaEntry = 24
