package fault

import (
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

var testPoint = NewPoint("fault.test")

func TestAPointFailsOnceAfterTheGivenNumberOfCalls(t *testing.T) {
	if err := Arm("fault.test", 2, io.ErrShortWrite); err != nil {
		t.Fatal(err)
	}
	before := Hits("fault.test")
	var got []error
	for range 5 {
		got = append(got, testPoint.Err())
	}
	want := []error{nil, nil, io.ErrShortWrite, nil, nil}
	if !slices.EqualFunc(got, want, func(a, b error) bool { return errors.Is(a, b) }) {
		t.Errorf("errors %v, want %v", got, want)
	}
	if n := Hits("fault.test") - before; n != 1 {
		t.Errorf("hits %d, want 1", n)
	}
}

func TestADisarmedPointSucceeds(t *testing.T) {
	if err := Arm("fault.test", 0, io.EOF); err != nil {
		t.Fatal(err)
	}
	Disarm("fault.test")
	if err := testPoint.Err(); err != nil {
		t.Errorf("disarmed point failed: %v", err)
	}
}

func TestArmingAnUnknownPointIsAnError(t *testing.T) {
	if err := Arm("fault.nobody", 0, io.EOF); err == nil {
		t.Error("arming a point that does not exist succeeded")
	}
	Disarm("fault.nobody")
	if Hits("fault.nobody") != 0 {
		t.Error("an unknown point has hits")
	}
}

func TestDeclaringAPointTwicePanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	NewPoint("fault.test")
}

func TestConcurrentCallersShareOneFailure(t *testing.T) {
	if err := Arm("fault.test", 100, io.EOF); err != nil {
		t.Fatal(err)
	}
	var failures atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				if testPoint.Err() != nil {
					failures.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if got := failures.Load(); got != 1 {
		t.Errorf("failures %d, want 1", got)
	}
}

func TestADisarmedPointDoesNotAllocate(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { _ = testPoint.Err() }); n != 0 {
		t.Errorf("allocations per call %v, want 0", n)
	}
}
