package guestagent

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// firstSample is how long the first request for metrics measures the processors;
// later ones measure since the one before. Shorter is noise: the kernel counts
// in steps of 10 ms.
const firstSample = 100 * time.Millisecond

// metrics is what GET /metrics answers.
type metrics struct {
	Time     int64   `json:"ts"` // Unix seconds
	CPUs     int     `json:"cpu_count"`
	CPUUsed  float64 `json:"cpu_used_pct"` // of all processors together, 0 to 100
	MemTotal uint64  `json:"mem_total"`    // bytes, as all below
	MemUsed  uint64  `json:"mem_used"`     // what programs and the kernel hold
	MemCache uint64  `json:"mem_cache"`    // what the kernel would give back
	// The same in MiB, for clients from before bytes.
	MemTotalMiB uint64 `json:"mem_total_mib"`
	MemUsedMiB  uint64 `json:"mem_used_mib"`
	DiskUsed    uint64 `json:"disk_used"`
	DiskTotal   uint64 `json:"disk_total"`
}

// processorTime is the first line of /proc/stat, in ticks.
type processorTime struct{ busy, all uint64 }

// meter remembers the last look at the processors.
type meter struct {
	mu   sync.Mutex
	last processorTime // guarded by mu
}

// used returns the percentage of processor time used since the last call.
func (m *meter) used() (float64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.last.all == 0 {
		first, err := readProcessorTime("/proc/stat")
		if err != nil {
			return 0, err
		}
		m.last = first
		time.Sleep(firstSample)
	}
	now, err := readProcessorTime("/proc/stat")
	if err != nil {
		return 0, err
	}
	before := m.last
	if now.all <= before.all {
		return 0, nil
	}
	m.last = now
	busy := min(now.busy-min(before.busy, now.busy), now.all-before.all)
	return 100 * float64(busy) / float64(now.all-before.all), nil
}

// readProcessorTime reads proc_stat(5): user nice system idle iowait irq softirq steal guest guest_nice.
func readProcessorTime(path string) (processorTime, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return processorTime{}, err
	}
	line, _, _ := bytes.Cut(content, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return processorTime{}, fmt.Errorf("%s: unexpected line %q", path, line)
	}
	var t processorTime
	for i, f := range fields[1:9] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return t, fmt.Errorf("%s: %w", path, err)
		}
		t.all += n
		if i != 3 && i != 4 { // neither idle nor waiting
			t.busy += n
		}
	}
	return t, nil
}

// readMemory reads proc_meminfo(5), in bytes.
func readMemory(path string) (map[string]uint64, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	values := map[string]uint64{}
	for s := bufio.NewScanner(bytes.NewReader(content)); s.Scan(); {
		name, rest, _ := strings.Cut(s.Text(), ":")
		number, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		if n, err := strconv.ParseUint(number, 10, 64); err == nil {
			values[name] = n << 10
		}
	}
	return values, nil
}

// measure takes the numbers of this moment.
func (m *meter) measure() (metrics, error) {
	used, err := m.used()
	if err != nil {
		return metrics{}, err
	}
	mem, err := readMemory("/proc/meminfo")
	if err != nil {
		return metrics{}, err
	}
	var disk unix.Statfs_t
	if err := unix.Statfs("/", &disk); err != nil {
		return metrics{}, fmt.Errorf("measure disk: %w", err)
	}
	total := mem["MemTotal"]
	inUse := total - min(mem["MemAvailable"], total)
	return metrics{
		Time: time.Now().Unix(), CPUs: runtime.NumCPU(), CPUUsed: used,
		MemTotal: total, MemUsed: inUse, MemCache: mem["Cached"] + mem["SReclaimable"],
		MemTotalMiB: total >> 20, MemUsedMiB: inUse >> 20,
		DiskTotal: disk.Blocks * uint64(disk.Bsize), DiskUsed: (disk.Blocks - disk.Bfree) * uint64(disk.Bsize),
	}, nil
}

// metrics is GET /metrics.
func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) {
	m, err := s.meter.measure()
	if err != nil {
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	writeJSON(w, m)
}
