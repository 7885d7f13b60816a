package vmm

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is also its own guard and a process that owns a host.
func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == GuardVerb:
		err = GuardMain(os.Args[2])
	case len(os.Args) == 5 && os.Args[1] == ownVerb:
		err = own(os.Args[2], os.Args[3], os.Args[4])
	default:
		goleak.VerifyTestMain(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
