package vmm

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is also its own guard and a process that owns a host.
func TestMain(m *testing.M) {
	BecomeGuard()
	if len(os.Args) == 5 && os.Args[1] == ownVerb {
		fmt.Fprintln(os.Stderr, own(os.Args[2], os.Args[3], os.Args[4]))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}
