package vmm

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain lets the test binary be its own guard.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == GuardVerb {
		if err := GuardMain(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}
