package hostmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// Files of the kernel that say how short of memory the host is.
const (
	meminfoFile  = "/proc/meminfo"
	pressureFile = "/proc/pressure/memory"
)

// ErrNoPressure: this kernel was built or started without PSI (CONFIG_PSI, psi=0).
var ErrNoPressure = errors.New("the kernel does not measure memory pressure")

// Available returns the host's memory and what of it can be had without swapping, as the
// kernel estimates it.
func Available() (total, available units.Bytes, err error) {
	raw, err := os.ReadFile(meminfoFile)
	if err != nil {
		return 0, 0, fmt.Errorf("read available memory: %w", err)
	}
	return parseMeminfo(raw)
}

func parseMeminfo(raw []byte) (total, available units.Bytes, err error) {
	found := 0
	for line := range bytes.Lines(raw) {
		name, rest, _ := strings.Cut(string(line), ":")
		var to *units.Bytes
		switch name {
		case "MemTotal":
			to = &total
		case "MemAvailable":
			to = &available
		default:
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("read %s of %s: %w", name, meminfoFile, err)
		}
		*to = units.Bytes(kb) << 10
		found++
	}
	if found != 2 {
		return 0, 0, fmt.Errorf("read %s: MemTotal or MemAvailable is missing", meminfoFile)
	}
	return total, available, nil
}

// Pressure returns the shares of the last ten seconds, in percent, in which some tasks and
// all tasks of the host waited for memory. ErrNoPressure: not in this kernel.
func Pressure() (some, full float64, err error) {
	raw, err := os.ReadFile(pressureFile)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, 0, ErrNoPressure
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read memory pressure: %w", err)
	}
	return parsePressure(raw)
}

// parsePressure reads "some avg10=0.00 avg60=..." and "full avg10=..." (Documentation/accounting/psi.rst).
func parsePressure(raw []byte) (some, full float64, err error) {
	found := 0
	for line := range bytes.Lines(raw) {
		kind, rest, _ := strings.Cut(string(line), " ")
		first, _, _ := strings.Cut(rest, " ")
		to := &some
		switch kind {
		case "some":
		case "full":
			to = &full
		default:
			continue
		}
		if *to, err = strconv.ParseFloat(strings.TrimPrefix(first, "avg10="), 64); err != nil {
			return 0, 0, fmt.Errorf("read %s: %w", pressureFile, err)
		}
		found++
	}
	if found != 2 {
		return 0, 0, fmt.Errorf("read %s: some or full is missing", pressureFile)
	}
	return some, full, nil
}
