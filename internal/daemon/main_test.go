package daemon

import (
	"os"
	"testing"

	"github.com/agentzip/agentzip/internal/vmm"
)

func TestMain(m *testing.M) {
	vmm.BecomeGuard() // the guard is this binary, run again
	os.Exit(m.Run())
}
