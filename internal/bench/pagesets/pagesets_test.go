package pagesets

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

const (
	testFrames   = 1024
	testSiblings = 5
	testGaps     = 3
)

// text is a page of words of which some repeat within it and none in other pages.
func text(seed uint64) *units.Page {
	p := new(units.Page)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], 0x9e3779b97f4a7c15*(seed<<16+r.Uint64N(200)+1))
	}
	return p
}

// testPage is what sibling s holds in a frame after a gap: by the frame's number, zeros, a
// block of the root image, the same in all siblings, nearly the template's page, or its own.
func testPage(s, gap int, f units.Frame) *units.Page {
	own := uint64(f)<<16 | uint64(gap)<<8 //nolint:gosec // G115: small
	switch f % 6 {
	case 0:
		return new(units.Page)
	case 1:
		return text(1<<40 + uint64(f)%64) // see testRoot
	case 2:
		return text(own | 1<<41)
	case 3:
		p := text(uint64(f))
		binary.LittleEndian.PutUint64(p[gap*8:], uint64(s)) //nolint:gosec // G115: small
		return p
	case 4: // nearly the same in all siblings
		p := text(own | 1<<42)
		binary.LittleEndian.PutUint64(p[s*64:], own|1)
		return p
	}
	return text(own | uint64(s)<<48) //nolint:gosec // G115: small
}

// testCapture writes a capture of synthetic siblings and returns its folder.
func testCapture(tb testing.TB) string {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	im, err := guestmem.NewImage(testFrames * units.PageSize)
	must(err)
	defer im.Close() //nolint:errcheck // of a test
	for f := range units.Frame(testFrames) {
		if f%2 == 1 {
			_, err = im.File().WriteAt(text(uint64(f))[:], f.Offset())
			must(err)
		}
	}
	must(im.Seal())
	root, err := os.Create(filepath.Join(tb.TempDir(), "root"))
	must(err)
	defer root.Close() //nolint:errcheck // of a test
	for i := range 64 {
		_, err = root.Write(text(1<<40 + uint64(i))[:]) //nolint:gosec // G115: small
		must(err)
	}
	dir := filepath.Join(tb.TempDir(), "capture")
	info := capture.Info{Tool: "test", Template: capture.Template{Name: "t", Digest: "0"}, Source: "made up"}
	for range testSiblings {
		info.Siblings = append(info.Siblings, capture.Sibling{Name: "s"})
	}
	w, err := capture.Create(dir, info)
	must(err)
	must(w.Template(tb.Context(), im, root))
	at := time.Duration(0)
	for gap := 1; gap <= testGaps; gap++ {
		for s := range testSiblings {
			at += time.Second
			_, err := w.Gap(capture.GapInfo{Sibling: s, Call: gap, Command: "true", Start: at - 2, End: at - 1, At: at}, func(visit func(units.Frame, *units.Page) error) error {
				for f := units.Frame(100 * gap); f < testFrames; f++ { // the first ones are gone
					when := gap
					if f%3 != 0 { // two thirds never change
						when = 1
					}
					if err := visit(f, testPage(s, when, f)); err != nil {
						return err
					}
				}
				return nil
			})
			must(err)
		}
	}
	_, err = w.Commit()
	must(err)
	return dir
}

func openSet(tb testing.TB) *Set {
	tb.Helper()
	s, err := Open(context.Background(), testCapture(tb))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

func TestEveryRowGivesEveryPageBackAndEachAdditionSaves(t *testing.T) {
	s := openSet(t)
	rep := s.NewReport("test")
	got := map[string]*Result{}
	for _, row := range Rows() {
		res, err := s.Run(t.Context(), row, 0)
		if err != nil {
			t.Fatalf("row %s: %v", row.Name, err)
		}
		if res.Wrong != 0 || res.Gaps != testSiblings*testGaps || res.Saved <= 0 || res.Saved >= 1 {
			t.Errorf("row %s: %d wrong, %d gaps, saved %.4f", row.Name, res.Wrong, res.Gaps, res.Saved)
		}
		got[row.Name] = res
		rep.Results = append(rep.Results, res)
	}
	// Private pages are counted alike in all rows: the baseline is the same.
	for name, r := range got {
		if r.Private != got[RowAll].Private {
			t.Errorf("row %s has %.0f bytes private, row %s %.0f", name, r.Private, RowAll, got[RowAll].Private)
		}
	}
	for _, pair := range [][2]string{{"rle", RowPaper}, {RowPaper, "+public"}, {"+public", "+shared"}, {"+shared", "+similar"}, {"-public", RowAll}, {"-shared", RowAll}, {"-similar", RowAll}, {"strict", RowAll}} {
		was, is := got[pair[0]].Kept, got[pair[1]].Kept
		if was.Encoded+was.Full <= is.Encoded+is.Full {
			t.Errorf("row %s keeps %.0f bytes of pages, row %s %.0f: want less", pair[0], was.Encoded+was.Full, pair[1], is.Encoded+is.Full)
		}
	}
	for _, o := range got["strict"].Stores {
		if slices.Contains([]string{"shared", "zstd-dict"}, o.Name) {
			t.Errorf("strict isolation kept %d pages as %s", o.Pages, o.Name)
		}
	}
	checkReport(t, rep)
}

func checkReport(t *testing.T, rep *Report) {
	t.Helper()
	form := regexp.MustCompile(`^codec saved5=\d+\.\d% saved4=n/a paper3=\d+\.\d% meta=\d+\.\d% enc_hit_pages_s=\d+ enc_pages_s=\d+ dec_p50_us=\d+\.\d dec_zstd_p50_us=\d+\.\d wrong=0$`)
	var text, js, lines, svg bytes.Buffer
	if err := errors.Join(rep.WriteText(&text), rep.WriteJSON(&js), rep.WriteBench(&lines), rep.WritePlot(&svg)); err != nil {
		t.Fatal(err)
	}
	last := strings.TrimSuffix(text.String(), "\n")
	if last = last[strings.LastIndexByte(last, '\n')+1:]; !form.MatchString(last) {
		t.Errorf("last line %q", last)
	}
	for _, row := range Rows() {
		if !strings.Contains(text.String(), row.Name) || !strings.Contains(svg.String(), ">"+row.Name+"<") {
			t.Errorf("row %s is missing in the table or the plot", row.Name)
		}
	}
	if !strings.Contains(lines.String(), "BenchmarkStore/row=agentzip/siblings=5/way=public ") {
		t.Errorf("no line for benchstat:\n%s", lines.String())
	}
}

func TestTheAccountOfARowAddsUp(t *testing.T) {
	s := openSet(t)
	row, _ := RowNamed(RowAll)
	res, err := s.Run(t.Context(), row, 2)
	if err != nil {
		t.Fatal(err)
	}
	// By hand: after its gap g a sibling has testFrames-100g private pages.
	private := 0.0
	for g := 1; g <= testGaps; g++ {
		for sib := range 2 {
			private += float64(testFrames - 100*g)
			if other := 1 - sib; other < sib {
				private += float64(testFrames - 100*g)
			} else if g > 1 {
				private += float64(testFrames - 100*(g-1))
			}
		}
	}
	if want := private * units.PageSize / (2 * testGaps); res.Private != want {
		t.Errorf("private %.0f, want %.0f", res.Private, want)
	}
	if res.Siblings != 2 || res.Gaps != 2*testGaps {
		t.Errorf("%d siblings, %d gaps", res.Siblings, res.Gaps)
	}
	if got := 1 - res.Kept.Net()/res.Private; got != res.Saved {
		t.Errorf("saved %v, the account says %v", res.Saved, got)
	}
}

func TestAPageThatComesBackWrongIsCounted(t *testing.T) {
	s := openSet(t)
	row, _ := RowNamed(RowAll)
	// Stores verify, so only loads at the end are hit.
	if err := fault.Arm("cohort.corrupt", 3, errors.New("injected")); err != nil {
		t.Fatal(err)
	}
	defer fault.Disarm("cohort.corrupt")
	res, err := s.Run(t.Context(), row, 0)
	if err != nil || res.Wrong != 1 {
		t.Errorf("%+v wrong, %v: want 1", res, err)
	}
}

func TestACancelledRunEndsWithoutAResult(t *testing.T) {
	s := openSet(t)
	row, _ := RowNamed(RowAll)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if res, err := s.Run(ctx, row, 0); !errors.Is(err, context.Canceled) || res != nil {
		t.Errorf("%v, %v", res, err)
	}
}

func TestTheIndexIsComparedWithBruteForce(t *testing.T) {
	s := openSet(t)
	r, err := s.Recall(t.Context(), 40, 2)
	if err != nil {
		t.Fatal(err)
	}
	if r.Pages != 40 || r.Bases == 0 || r.Brute > r.Index || r.Index > r.None+4*r.Pages || r.PublicOf != 2 {
		t.Errorf("%+v", r)
	}
	if g := r.Gain(); g < 0.5 {
		t.Errorf("the index finds %.0f %% of what near-copies of siblings offer", 100*g)
	}
}

func TestASoakFindsNothingWrong(t *testing.T) {
	s := openSet(t)
	rounds := int64(40_000)
	if testing.Short() {
		rounds /= 10
	}
	calls := 0
	res, err := s.Soak(t.Context(), SoakOptions{Rounds: rounds, Workers: 2, Seed: 7, Progress: func(SoakResult) { calls++ }})
	if err != nil || res.Wrong != 0 {
		t.Fatalf("%+v, %v", res, err)
	}
	if res.Rounds+res.Refused < rounds || len(res.Ways) < 5 {
		t.Errorf("%+v: want %d rounds in many ways", res, rounds)
	}
}

func TestASoakCountsWrongPages(t *testing.T) {
	s := openSet(t)
	if err := fault.Arm("cohort.corrupt", 500, errors.New("injected")); err != nil {
		t.Fatal(err)
	}
	defer fault.Disarm("cohort.corrupt")
	if res, err := s.Soak(t.Context(), SoakOptions{Rounds: 20_000, Workers: 1, Seed: 1}); err == nil || res.Wrong != 1 {
		t.Errorf("%d wrong, %v: want 1 and an error", res.Wrong, err)
	}
}
