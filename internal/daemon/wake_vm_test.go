package daemon

import (
	"context"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
)

// napLoop sleeps for a fifth of a second and says how late it woke, as the host's clock drives it.
const napLoop = `
import sys, time
n = int(sys.argv[1])
late = []
for i in range(n):
    t = time.monotonic()
    time.sleep(0.2)
    late.append(time.monotonic() - t - 0.2)
late.sort()
print("%d %.3f %.3f" % (len(late), late[len(late)//2], late[-1]))
`

// wakeLate is by how much a guest may wake late while it is evicted and restored: what the
// issue calls a hang.
const wakeLate = time.Second

// A guest that sleeps most of the time is evicted again and again while it does. The number
// of passes is small; AGENTZIP_CYCLES sets another (1,000 take some three minutes).
func TestASleepingGuestThatIsEvictedAgainAndAgainWakesOnTime(t *testing.T) {
	cycles := 60
	if given := os.Getenv("AGENTZIP_CYCLES"); given != "" {
		var err error
		if cycles, err = strconv.Atoi(given); err != nil {
			t.Fatal(err)
		}
	}
	s := cloneOne(t, openDaemon(t, 0))
	if err := uploadText(t.Context(), s, "/tmp/nap.py", napLoop); err != nil {
		t.Fatal(err)
	}
	sh(t, s, "user", "python3 /tmp/nap.py 1") // its files are known
	var out, errs strings.Builder
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var guest sync.WaitGroup
	var failed error
	guest.Go(func() { // a pass may run beside a call: Compress asks no rhythm
		_, failed = s.Run(ctx, guestlink.Command{Shell: "python3 /tmp/nap.py " + strconv.Itoa(cycles), User: "user"}, &out, &errs)
	})
	passes := 0
	for ended := make(chan struct{}); ; passes++ {
		if passes == 0 {
			go func() { guest.Wait(); close(ended) }()
		}
		if _, err := s.Compress(t.Context()); err != nil {
			t.Fatalf("pass %d: %v", passes, err)
		}
		select {
		case <-ended:
		case <-time.After(150 * time.Millisecond):
			continue
		}
		break
	}
	if failed != nil {
		t.Fatal(failed)
	}
	words := strings.Fields(out.String())
	if len(words) != 3 || words[0] != strconv.Itoa(cycles) {
		t.Fatalf("the guest says %q, %q", out.String(), errs.String())
	}
	worst, err := strconv.ParseFloat(words[2], 64)
	if err != nil {
		t.Fatal(err)
	}
	st, _ := s.Pager()
	t.Logf("%d passes; naps %s, late p50 %s s, max %s s; %d blocking restores, p99 %v", passes, words[0], words[1], words[2], st.Blocking.Count, st.Blocking.P99())
	if worst > wakeLate.Seconds() {
		t.Errorf("the guest woke %.3f s late", worst)
	}
	if passes < cycles/4 || st.Blocking.Count == 0 {
		t.Errorf("%d passes, %d pages restored: the guest was not evicted while it slept", passes, st.Blocking.Count)
	}
}
