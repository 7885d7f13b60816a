package dictionary

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A tongue is a set of lines that the pages of one job share.
type tongue [300]string

func newTongue(seed uint64) *tongue {
	r := rand.New(rand.NewPCG(seed, 1))
	var t tongue
	for i := range t {
		l := make([]byte, 20+r.IntN(60))
		for k := range l {
			l[k] = "eeeaaatttoinshrdlucmfwyp_ .()="[r.IntN(30)]
		}
		t[i] = string(l)
	}
	return &t
}

func (t *tongue) page(r *rand.Rand) *units.Page {
	var b strings.Builder
	for b.Len() < units.PageSize {
		b.WriteString(t[r.IntN(len(t))])
	}
	var p units.Page
	copy(p[:], b.String())
	return &p
}

func newCohort(t *testing.T, o Options) *Set {
	t.Helper()
	c := New(o)
	t.Cleanup(c.Close)
	return c
}

func offer(c *Set, t *tongue, r *rand.Rand, n int) {
	for range n {
		c.Sample(t.page(r))
	}
}

// trainOn trains c on pages of t, as often as its rule needs to see them.
func trainOn(t *testing.T, c *Set, to *tongue, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 2))
	for c.samples.size() < units.Bytes(c.samples.most)*units.PageSize {
		offer(c, to, r, 100)
	}
	if err := c.Train(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestACohortStartsWithoutADictionary(t *testing.T) {
	c := newCohort(t, Options{})
	if d := c.Dictionary(); d != nil {
		t.Errorf("got dictionary %d", d.ID())
	}
	if c.Lookup(1) != nil || c.Retain(1) {
		t.Error("dictionary 1 exists before a training")
	}
	if !c.Retain(0) {
		t.Error("a page without dictionary is refused")
	}
	c.Release(0)
	if diff := cmp.Diff(Stats{}, c.Stats()); diff != "" {
		t.Errorf("stats (-want +got):\n%s", diff)
	}
}

func TestATrainedDictionaryMakesPagesSmaller(t *testing.T) {
	c := newCohort(t, Options{Samples: 400})
	job := newTongue(1)
	trainOn(t, c, job, 1)
	var fresh []units.Page
	r := rand.New(rand.NewPCG(99, 99))
	for range 50 {
		fresh = append(fresh, *job.page(r))
	}
	was, is := encodedSize(fresh, nil), encodedSize(fresh, c.Dictionary())
	if is > was*3/4 {
		t.Errorf("%d bytes with the dictionary, %d without", is, was)
	}
	s := c.Stats()
	if s.Current != 1 || s.Trainings != 1 || s.Reservoir != 0 || s.Dictionaries != c.Dictionary().Size() {
		t.Errorf("stats: %+v", s)
	}
}

func TestADictionaryLivesUntilItsLastPageIsGone(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	trainOn(t, c, newTongue(1), 1)
	first := c.Dictionary()
	for range 2 {
		if !c.Retain(first.ID()) {
			t.Fatal("the current dictionary cannot be retained")
		}
	}
	trainOn(t, c, newTongue(2), 2)
	second := c.Dictionary()
	if second.ID() <= first.ID() {
		t.Errorf("id %d after %d", second.ID(), first.ID())
	}
	if c.Lookup(first.ID()) != first || !c.Retain(first.ID()) {
		t.Error("a retired dictionary that pages name is gone")
	}
	want := []codec.DictID{first.ID(), second.ID()}
	if s := c.Stats(); !cmp.Equal(s.IDs, want) || s.Pages != 3 || s.Dictionaries != first.Size()+second.Size() {
		t.Errorf("stats: %+v", s)
	}
	c.Release(first.ID())
	c.Release(first.ID())
	if c.Lookup(first.ID()) == nil {
		t.Error("gone with one page left")
	}
	c.Release(first.ID())
	if c.Lookup(first.ID()) != nil || c.Retain(first.ID()) {
		t.Error("alive after its last page")
	}
	if s := c.Stats(); !cmp.Equal(s.IDs, want[1:]) || s.Pages != 0 || s.Dictionaries != second.Size() {
		t.Errorf("stats: %+v", s)
	}
	// The caller of Dictionary who comes too late encodes without.
	page := newTongue(1).page(rand.New(rand.NewPCG(3, 3)))
	e := codec.NewEncoder(codec.Options{})
	defer e.Close()
	if enc, ok := e.Encode(page, nil, first); !ok || enc.Dict() != 0 {
		t.Errorf("a gone dictionary encodes: ok %v, dict %d", ok, enc.Dict())
	}
}

func TestADictionaryThatNoPageNamesDiesWhenReplaced(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	trainOn(t, c, newTongue(1), 1)
	trainOn(t, c, newTongue(2), 2)
	if s := c.Stats(); !cmp.Equal(s.IDs, []codec.DictID{2}) {
		t.Errorf("alive: %v, want only 2", s.IDs)
	}
}

func TestMoreReleasesThanRetainsPanic(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	c.Release(1)
}

func TestATrainingThatCannotSucceedKeepsTheOldDictionary(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 64 << 10}) // room for all of the job's lines
	if err := c.Train(t.Context()); !errors.Is(err, codec.ErrSamples) {
		t.Errorf("without samples: %v, want ErrSamples", err)
	}
	job := newTongue(1)
	trainOn(t, c, job, 1)
	old := c.Dictionary()

	same := job.page(rand.New(rand.NewPCG(5, 5)))
	for range 4 * 500 {
		c.Sample(same)
	}
	if err := c.Train(t.Context()); !errors.Is(err, codec.ErrSamples) {
		t.Errorf("one page 500 times: %v, want ErrSamples", err)
	}
	c.samples.opens.Store(0)
	offer(c, job, rand.New(rand.NewPCG(6, 6)), 4*300)
	if err := c.Train(t.Context()); !errors.Is(err, ErrNoBetter) {
		t.Errorf("more of the same job: %v, want ErrNoBetter", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Train(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if c.Dictionary() != old || c.Lookup(old.ID()) != old {
		t.Error("the old dictionary is gone")
	}
	if s := c.Stats(); s.Trainings != 1 || s.Refusals < 3 {
		t.Errorf("stats: %+v", s)
	}
}

func TestPagesOfAlmostOneByteTrainPolitely(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 64 << 10})
	for i := range 2000 { // different, yet alike
		var p units.Page
		binary.LittleEndian.PutUint64(p[8*(i%512):], uint64(i+1))
		c.Sample(&p)
	}
	err := c.Train(t.Context())
	if !errors.Is(err, codec.ErrSamples) && !errors.Is(err, ErrNoBetter) {
		t.Errorf("got %v, want a refusal", err)
	}
	if c.Dictionary() != nil {
		t.Error("a dictionary came of it")
	}
}

func TestTheReservoirIsBoundedAndEmptiesAfterATraining(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	r := rand.New(rand.NewPCG(7, 7))
	job := newTongue(7)
	var zero units.Page
	for range 400 {
		c.Sample(&zero)
	}
	if got := c.Stats().Reservoir; got != 0 {
		t.Errorf("zero pages fill %v", got)
	}
	offer(c, job, r, 1500)
	if got, want := c.Stats().Reservoir, 300*units.Bytes(units.PageSize); got != want {
		t.Errorf("reservoir %v, want %v", got, want)
	}
	// Later pages have their place: with 300 of 1,500 kept, some of the last third are.
	last := map[uint32]bool{}
	r = rand.New(rand.NewPCG(7, 7))
	for i := range 1500 {
		if p := job.page(r); i >= 1000 {
			last[codec.Checksum(p)] = true
		}
	}
	late := 0
	for _, p := range asPages(c.samples.mapping.Data)[:c.samples.count] {
		if last[codec.Checksum(&p)] {
			late++
		}
	}
	if late < 50 || late > 150 {
		t.Errorf("%d of 300 samples are of the last third, want about 100", late)
	}
	if err := c.Train(t.Context()); err != nil {
		t.Fatal(err)
	}
	offer(c, job, r, 1000) // the next training is due at some 4 times as many
	if got := c.Stats().Reservoir; got != 0 {
		t.Errorf("reservoir %v right after a training", got)
	}
}

func TestAReservoirThatNeverFillsIsDropped(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	job := newTongue(8)
	var few []*units.Page
	r := rand.New(rand.NewPCG(8, 8))
	for range 40 {
		few = append(few, job.page(r))
	}
	for i := range 300*patience + 1 {
		c.Sample(few[i%len(few)])
	}
	select {
	case <-c.samples.full:
	default:
		t.Fatal("no training is due")
	}
	if err := c.Train(t.Context()); !errors.Is(err, codec.ErrSamples) {
		t.Errorf("got %v, want ErrSamples", err)
	}
	if got := c.Stats().Reservoir; got != 0 {
		t.Errorf("%v are kept", got)
	}
}

func TestRunTrainsWhenThereAreSamplesAndEndsWithItsContext(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	job, r := newTongue(9), rand.New(rand.NewPCG(9, 9))
	for deadline := time.Now().Add(20 * time.Second); c.Dictionary() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no dictionary after 20 s: %+v", c.Stats())
		}
		offer(c, job, r, 20)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	for deadline := time.Now().Add(5 * time.Second); niceThreads(t) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a thread at nice 10 outlives the training")
		}
	}
}

// niceThreads counts this process's threads at the training's niceness. The main
// thread is left out: the runtime parks it for ever instead of ending it.
func niceThreads(t *testing.T) (n int) {
	t.Helper()
	names, err := filepath.Glob("/proc/self/task/*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it ended meanwhile
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:])) // from field 3 on, proc(5)
		if f[16] == strconv.Itoa(trainingNice) && f[0] != "Z" && f[0] != "X" && !strings.HasPrefix(string(b), strconv.Itoa(os.Getpid())+" ") {
			n++
		}
	}
	return n
}

func TestPagesComeBackWhileDictionariesComeAndGo(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 8 << 10})
	tongues := []*tongue{newTongue(1), newTongue(2), newTongue(3)}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(10, uint64(g)))
			e, d := codec.NewEncoder(codec.Options{}), codec.NewDecoder()
			defer e.Close()
			defer d.Close()
			type kept struct {
				page units.Page
				enc  codec.Encoded
			}
			var held []kept
			drop := func() {
				i := r.IntN(len(held))
				var got units.Page
				if err := d.Decode(&got, held[i].enc, nil, c.Lookup(held[i].enc.Dict())); err != nil || got != held[i].page {
					t.Errorf("a page with dictionary %d does not come back: %v", held[i].enc.Dict(), err)
				}
				c.Release(held[i].enc.Dict())
				held = append(held[:i], held[i+1:]...)
			}
			for {
				select {
				case <-stop:
					for len(held) > 0 {
						drop()
					}
					return
				default:
				}
				page := tongues[r.IntN(3)].page(r)
				c.Sample(page)
				enc, ok := e.Encode(page, nil, c.Dictionary())
				if ok && c.Retain(enc.Dict()) {
					enc.Data = append([]byte(nil), enc.Data...)
					held = append(held, kept{*page, enc})
				}
				if len(held) > 30 {
					drop()
				}
			}
		})
	}
	for i := range 4 {
		r := rand.New(rand.NewPCG(11, uint64(i)))
		c.samples.opens.Store(0)
		for c.samples.size() < 300*units.PageSize {
			offer(c, tongues[i%3], r, 50)
		}
		if err := c.Train(t.Context()); err != nil && !errors.Is(err, ErrNoBetter) && !errors.Is(err, codec.ErrSamples) {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
	s := c.Stats()
	if s.Pages != 0 || len(s.IDs) != 1 || s.IDs[0] != s.Current || s.Trainings < 2 {
		t.Errorf("after all pages went: %+v", s)
	}
}

func TestTheFaultPathDoesNotAllocate(t *testing.T) {
	c := newCohort(t, Options{Samples: 300, DictSize: 16 << 10})
	trainOn(t, c, newTongue(1), 1)
	page := newTongue(1).page(rand.New(rand.NewPCG(12, 12)))
	if n := testing.AllocsPerRun(100, func() {
		id := c.Dictionary().ID()
		c.Retain(id)
		_ = c.Lookup(id)
		c.Release(id)
		c.Sample(page)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkSample(b *testing.B) {
	job := newTongue(1)
	r := rand.New(rand.NewPCG(1, 1))
	pages := make([]*units.Page, 200)
	for i := range pages {
		pages[i] = job.page(r)
	}
	for _, open := range []bool{false, true} {
		b.Run(fmt.Sprintf("open=%v", open), func(b *testing.B) {
			c := New(Options{})
			defer c.Close()
			if !open {
				c.samples.opens.Store(1 << 60)
			}
			n := 0
			for b.Loop() {
				c.Sample(pages[n%len(pages)])
				n++
			}
		})
	}
}

func TestNothingIsCollectedWhereADictionaryCannotPayForItself(t *testing.T) {
	stake := units.Bytes(1 << 20)
	c := New(Options{Samples: 400, AtStake: func() units.Bytes { return stake }})
	t.Cleanup(c.Close)
	job, r := newTongue(1), rand.New(rand.NewPCG(2, 3))
	offer(c, job, r, 1000)
	if s := c.Stats(); s.Reservoir != 0 || s.Offered != 0 {
		t.Errorf("with 1 MiB at stake %v of samples are kept", s.Reservoir)
	}
	stake = units.GiB
	offer(c, job, r, 1000)
	if s := c.Stats(); s.Reservoir == 0 {
		t.Error("with 1 GiB at stake no samples are kept")
	}
}
