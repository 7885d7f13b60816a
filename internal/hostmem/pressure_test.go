package hostmem

import (
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func TestTheHostSaysHowMuchMemoryItHas(t *testing.T) {
	t.Parallel()
	total, available, err := Available()
	if err != nil || available <= 0 || total < available {
		t.Errorf("got %v of %v, %v", available, total, err)
	}
	some, full, err := Pressure()
	if err != nil && !errors.Is(err, ErrNoPressure) || full > some+0.01 || some > 100 {
		t.Errorf("got some %v, full %v, %v", some, full, err)
	}
}

func TestPressureIsReadFromTheKernelsLines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text string
		some, full float64
		ok         bool
	}{
		{"both", "some avg10=1.53 avg60=0.87 avg300=0.21 total=1\nfull avg10=0.40 avg60=0.22 avg300=0.05 total=1\n", 1.53, 0.4, true},
		{"one is missing", "some avg10=1.53 avg60=0.87 avg300=0.21 total=1\n", 0, 0, false},
		{"no number", "some avg10=x avg60=0\nfull avg10=0 avg60=0\n", 0, 0, false},
		{"nothing", "", 0, 0, false},
	} {
		some, full, err := parsePressure([]byte(c.text))
		if (err == nil) != c.ok || c.ok && (some != c.some || full != c.full) {
			t.Errorf("%s: got %v, %v, %v", c.name, some, full, err)
		}
	}
}

func TestAvailableMemoryIsReadFromTheKernelsLines(t *testing.T) {
	t.Parallel()
	total, available, err := parseMeminfo([]byte("MemTotal:        8388608 kB\nMemFree:  1 kB\nMemAvailable:    4194304 kB\n"))
	if err != nil || total != 8*units.GiB || available != 4*units.GiB {
		t.Errorf("got %v of %v, %v, want 4 GiB of 8 GiB", available, total, err)
	}
	for _, text := range []string{"", "MemTotal: 1 kB\n", "MemTotal: 1 kB\nMemAvailable: many kB\n"} {
		if _, _, err := parseMeminfo([]byte(text)); err == nil {
			t.Errorf("%q was read without an error", text)
		}
	}
}
