package pagesets

import (
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// An out is what became of a page: a cohort.Way, or one of these.
type out int

const (
	outZero  = out(cohort.NumWays) + iota // all zeros: nothing is kept
	outEqual                              // the template's page: nothing is kept
	outFull                               // does not shrink
	outFlat                               // kept for itself, in a row without a pool
	numOuts
)

func (o out) String() string {
	switch o {
	case outZero:
		return "zero"
	case outEqual:
		return "template"
	case outFull:
		return "full size"
	case outFlat:
		return "flat"
	case numOuts:
		return ""
	}
	return cohort.Way(o).String()
}

// samples are timings and byte counts while a replay runs.
type samples struct {
	stores    [numOuts][]time.Duration
	loads     [cohort.NumWays][]time.Duration
	hotLoads  []time.Duration
	wayBytes  [cohort.NumWays]int64
	flatBytes int64

	gaps    int
	private float64 // sums over gaps, bytes
	sum     Account
}

func (r *replay) note(o out, took time.Duration) { r.stores[o] = append(r.stores[o], took) }

// An Account is what is kept, in bytes: averages over the gaps of a Result.
type Account struct {
	Encoded      float64 `json:"encoded"`      // bytes of entries
	Slack        float64 `json:"slack"`        // of the pool
	PoolMeta     float64 `json:"pool_meta"`    // headers and tables of the pool
	Index        float64 `json:"index"`        // by content and similarity
	Dictionaries float64 `json:"dictionaries"` // samples in training included
	PageTables   float64 `json:"page_tables"`
	Library      float64 `json:"library"` // of public pages: once for a host
	Full         float64 `json:"full"`    // pages that do not shrink
}

// Net is all of it.
func (a Account) Net() float64 {
	return a.Encoded + a.Slack + a.PoolMeta + a.Index + a.Dictionaries + a.PageTables + a.Library + a.Full
}

// Meta is what describes pages and is no page's content.
func (a Account) Meta() float64 { return a.PoolMeta + a.Index + a.Dictionaries }

// account adds the moment after a gap to the averages.
func (r *replay) account() error {
	r.gaps++
	pages := 0
	for _, b := range r.boxes {
		if b.gaps == 0 {
			continue
		}
		pages += len(b.pages)
		r.sum.Full += float64(b.full) * units.PageSize
		if r.cohort != nil {
			n, err := b.tally.Size()
			if err != nil {
				return err
			}
			r.sum.PageTables += float64(n)
		}
	}
	r.private += float64(pages) * units.PageSize
	if r.cohort == nil {
		r.sum.Encoded += float64(r.flatBytes)
		return nil
	}
	s := r.cohort.Stats()
	r.sum.Encoded += float64(s.Pool.Live)
	r.sum.Slack += float64(s.Pool.Slack)
	r.sum.PoolMeta += float64(s.Pool.Meta)
	r.sum.Index += float64(s.Index)
	r.sum.Dictionaries += float64(s.Dictionaries)
	if !r.row.without.Has(cohort.WayPublic) {
		r.sum.Library += float64(r.set.library.Size())
	}
	return nil
}

// An Outcome is what became of some of the pages that were stored.
type Outcome struct {
	Name  string        `json:"name"`
	Pages int           `json:"pages"`
	Bytes int64         `json:"bytes"` // of entries made
	P50   time.Duration `json:"p50_ns"`
	P99   time.Duration `json:"p99_ns"`
	Total time.Duration `json:"total_ns"`
}

// A Result is what one row did.
type Result struct {
	Row      string  `json:"row"`
	Siblings int     `json:"siblings"`
	Gaps     int     `json:"gaps"`
	Private  float64 `json:"private"` // bytes, average over the gaps
	Kept     Account `json:"kept"`
	Saved    float64 `json:"saved"`     // 1 - Kept.Net() / Private
	MetaPart float64 `json:"meta_part"` // Kept.Meta() / what the pool, its indexes and dictionaries occupy

	Pages      int           `json:"pages"` // stored
	Encoding   time.Duration `json:"encoding_ns"`
	Compacting time.Duration `json:"compacting_ns"`
	Stores     []Outcome     `json:"stores"`
	Loading    []Outcome     `json:"loading"`
	Hot        Outcome       `json:"hot"` // loads of pages that were expected to be touched soon
	Loads      int           `json:"loads"`
	Wrong      int           `json:"wrong"` // loads that failed or gave another page
	Took       time.Duration `json:"took_ns"`

	sorted map[string][]time.Duration // loads by way, ascending
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func outcome(name string, d []time.Duration, bytes int64) Outcome {
	slices.Sort(d)
	o := Outcome{Name: name, Pages: len(d), Bytes: bytes, P50: quantile(d, 0.5), P99: quantile(d, 0.99)}
	for _, x := range d {
		o.Total += x
	}
	return o
}

// finish makes the result of the samples.
func (r *replay) finish() {
	n := float64(max(1, r.gaps))
	a := r.sum
	for _, v := range []*float64{&a.Encoded, &a.Slack, &a.PoolMeta, &a.Index, &a.Dictionaries, &a.PageTables, &a.Library, &a.Full} {
		*v /= n
	}
	res := r.res
	res.Gaps, res.Private, res.Kept = r.gaps, r.private/n, a
	if res.Private > 0 {
		res.Saved = 1 - a.Net()/res.Private
	}
	if pool := a.Encoded + a.Slack + a.Meta(); pool > 0 && r.cohort != nil {
		res.MetaPart = a.Meta() / pool
	}
	for o, d := range r.stores {
		if len(d) == 0 {
			continue
		}
		var bytes int64
		if o < cohort.NumWays {
			bytes = r.wayBytes[o]
		}
		x := outcome(out(o).String(), d, bytes)
		res.Stores = append(res.Stores, x)
		res.Pages += x.Pages
		res.Encoding += x.Total
	}
	res.sorted = map[string][]time.Duration{}
	for w, d := range r.loads {
		if len(d) > 0 {
			res.Loading = append(res.Loading, outcome(cohort.Way(w).String(), d, 0))
			res.sorted[cohort.Way(w).String()] = d
		}
	}
	res.Hot = outcome("hot", r.hotLoads, 0)
}

// StoreRate returns pages a second and core over the outcomes named, all for none.
func (r *Result) StoreRate(names ...string) float64 {
	pages, total := 0, time.Duration(0)
	for _, o := range r.Stores {
		if len(names) == 0 || slices.Contains(names, o.Name) {
			pages += o.Pages
			total += o.Total
		}
	}
	if total == 0 {
		return 0
	}
	return float64(pages) / total.Seconds()
}

// LoadQuantile returns a quantile of the loads of pages kept in the ways named.
func (r *Result) LoadQuantile(q float64, names ...string) time.Duration {
	var all []time.Duration
	for _, n := range names {
		all = append(all, r.sorted[n]...)
	}
	slices.Sort(all)
	return quantile(all, q)
}
