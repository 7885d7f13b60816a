package hostmem

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"
)

// userHz is the unit of times in /proc/PID/stat: 100 a second on all Linux (proc(5), sysconf(_SC_CLK_TCK)).
const userHz = 100

// CPUTime returns the time that all threads of a process have computed, in
// steps of 10 ms.
func CPUTime(pid int) (time.Duration, error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	// The second field is the command's name in brackets and may hold anything.
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3 // proc(5) counts from 1, and two fields are cut off
	if len(fields) <= stime {
		return 0, fmt.Errorf("read CPU time of process %d: %d fields", pid, len(fields))
	}
	var ticks uint64
	for _, i := range []int{utime, stime} {
		n, err := strconv.ParseUint(string(fields[i]), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / userHz, nil
}
