package store

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t interface{ Fatal(args ...any) }, dir string) *Store {
	s, err := Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Whatever is written in whichever way, now or later: what is read after a
// restart is the last value of each key.
func TestTheStoreIsAMapThatSurvives(t *testing.T) {
	var runs atomic.Int64
	top := t
	rapid.Check(t, func(t *rapid.T) {
		dir := filepath.Join(top.TempDir(), strconv.FormatInt(runs.Add(1), 10))
		s := open(t, dir)
		defer func() { _ = s.Close() }()
		want := map[string]int{}
		for i := range rapid.IntRange(0, 30).Draw(t, "steps") {
			id := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "id")
			var err error
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0:
				want[id] = i
				err = s.Put(Sandboxes, id, i)
			case 1, 2:
				want[id] = i
				err = s.PutLater(Sandboxes, id, i)
			case 3:
				delete(want, id)
				s.DeleteLater(Sandboxes, id)
			case 4:
				delete(want, id)
				err = s.Delete(Sandboxes, id)
			case 5:
				if err = s.Close(); err == nil {
					s = open(t, dir)
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			var got int
			ok, err := s.Get(Sandboxes, id, &got)
			if v, has := want[id]; err != nil || ok != has || got != v {
				t.Fatalf("%s = %d, %v, %v; want %d, %v", id, got, ok, err, v, has)
			}
		}
		got := map[string]int{}
		if err := Each(s, Sandboxes, func(id string, v int) { got[id] = v }); err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(got, want) {
			t.Fatalf("all: %v, want %v", got, want)
		}
	})
}

func TestWhatWasPutIsOnTheDiskWithoutAClose(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	defer s.Close()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := s.Put(Keys, fmt.Sprint(i), i); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	// A copy of the file is what a killed daemon leaves.
	raw, err := os.ReadFile(filepath.Join(dir, "gateway.db"))
	if err != nil {
		t.Fatal(err)
	}
	left := t.TempDir()
	if err := os.WriteFile(filepath.Join(left, "gateway.db"), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	again := open(t, left)
	defer again.Close()
	n := 0
	if err := Each(again, Keys, func(string, int) { n++ }); err != nil || n != 20 {
		t.Errorf("%d of 20 records, %v", n, err)
	}
}

func TestTwoProcessesCannotHaveIt(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	defer s.Close()
	if _, err := Open(dir, slog.New(slog.DiscardHandler)); !errors.Is(err, ErrLocked) {
		t.Errorf("second open: %v, want ErrLocked", err)
	}
}

func TestABadRecordDoesNotTakeTheOthersDown(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	defer s.Close()
	if err := errors.Join(s.Put(Sandboxes, "bad", "text"), s.Put(Sandboxes, "good", Sandbox{ID: "good"})); err != nil {
		t.Fatal(err)
	}
	var seen []string
	if err := Each(s, Sandboxes, func(id string, _ Sandbox) { seen = append(seen, id) }); err != nil {
		t.Fatal(err)
	}
	if len(seen) != 1 || seen[0] != "good" {
		t.Errorf("read %q, want the good one", seen)
	}
}
