package hostmem

import (
	"os"
	"testing"
	"time"
)

func TestCPUTimeGrowsByWhatWasComputed(t *testing.T) {
	before, err := CPUTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for begin := time.Now(); time.Since(begin) < 100*time.Millisecond; {
	}
	after, err := CPUTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if used := after - before; used < 20*time.Millisecond || used > 5*time.Second {
		t.Errorf("100 ms of computing are %v of CPU time", used)
	}
	if _, err := CPUTime(1 << 30); err == nil {
		t.Error("a process that does not exist has a CPU time")
	}
}
