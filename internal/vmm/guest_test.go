package vmm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// bootSector is testdata/boot.s, assembled, without its last sixteen bytes.
const bootSector = "" +
	"fa31c08ed88ed0bc007ca30005ff060005be927cac84c07405e86700ebf68b1e" +
	"0005b104c1c30488d8240f04303c3976020427e84d00fec975eab00ae8440066" +
	"b900002000664975fca100053b06f07d72bba0f27d3c0174133c0274183c0374" +
	"1a3c0475a8b078e81900ebf9ba0406b80020efeb98b0fee664eb92ba0505b001" +
	"eeeb8a50bafd03eca82074f858baf803eec37469636b20"

// What the guest of bootSector does after so many ticks.
const (
	tickOn byte = iota
	powerOff
	reboot
	reportPanic
	floodConsole
)

// hardware is small: the guest is one sector.
var hardware = Hardware{Memory: 64 * units.MiB}

// guestDisk returns a disk that boots the guest.
func guestDisk(t *testing.T, h *Host, limit uint16, action byte) *os.File {
	t.Helper()
	sector := make([]byte, 512)
	if _, err := hex.Decode(sector, []byte(bootSector)); err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint16(sector[0x1f0:], limit)
	sector[0x1f2] = action
	sector[0x1fe], sector[0x1ff] = 0x55, 0xaa
	f, err := h.TempFile("disk")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if _, err := f.Write(sector); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	return f
}

// needQEMU skips a test that cannot run without QEMU and root.
func needQEMU(tb testing.TB) {
	tb.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		tb.Skip("needs QEMU: apt-get install qemu-system-x86")
	}
	if os.Geteuid() != 0 {
		tb.Skip("needs root: VMMs run as users of their own")
	}
}

// testHost returns a host with run folders of its own. Closed by the test's end, it
// must have left nothing in them.
func testHost(t *testing.T, o HostOptions) *Host {
	t.Helper()
	needQEMU(t)
	o.RunDir, o.StateDir = t.TempDir()+"/run", t.TempDir()
	h, err := OpenHost(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(o.RunDir); !os.IsNotExist(err) {
			t.Errorf("the run folder is left: %v", err)
		}
		for _, dir := range h.groups.Dirs("agentzip/" + h.run.ID()) {
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("cgroup %s is left: %v", dir, err)
			}
		}
	})
	return h
}

// newImage returns the memory of a guest that is to boot.
func newImage(t *testing.T) *guestmem.Image {
	t.Helper()
	im, err := guestmem.NewImage(hardware.Memory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = im.Close() })
	return im
}

// bootGuest starts the guest of bootSector.
func bootGuest(t *testing.T, h *Host, limit uint16, action byte) Machine {
	t.Helper()
	return startRunning(t, h, Spec{Mode: Boot, Hardware: hardware, Memory: newImage(t).File(), Disk: guestDisk(t, h, limit, action)})
}

func startRunning(t *testing.T, h *Host, s Spec) Machine {
	t.Helper()
	m, err := h.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// tiny is a template of the guest of bootSector: what a clone's Spec needs.
type tiny struct {
	image *guestmem.Image
	state *os.File
}

// buildTiny boots the guest, stops it after some ticks and saves it.
func buildTiny(t *testing.T, h *Host, limit uint16, action byte) tiny {
	t.Helper()
	im := newImage(t)
	m := startRunning(t, h, Spec{Mode: Boot, Hardware: hardware, Memory: im.File(), Disk: guestDisk(t, h, limit, action)})
	waitConsole(t, m, "tick 0003")
	if err := m.Link().Close(); err != nil {
		t.Fatal(err)
	}
	state, err := h.TempFile("state")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = state.Close() })
	if err := m.SaveState(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	m.Kill()
	if err := im.PunchZeroPages(); err != nil {
		t.Fatal(err)
	}
	if err := im.Seal(); err != nil {
		t.Fatal(err)
	}
	return tiny{im, state}
}

func (tt tiny) spec(t *testing.T, h *Host) Spec {
	t.Helper()
	return Spec{Mode: Clone, Hardware: hardware, Memory: tt.image.File(), State: tt.state, Disk: guestDisk(t, h, 0, tickOn)}
}

// waitConsole waits until the guest has printed want.
func waitConsole(t *testing.T, m Machine, want string) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for !bytes.Contains(m.Console(), []byte(want)) {
		select {
		case <-m.Done():
			t.Fatalf("machine ended before %q: %v\nconsole: %q\nlog: %q", want, m.Exit(), m.Console(), m.Log())
		case <-deadline:
			t.Fatalf("no %q on the console: %q", want, m.Console())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// waitExit waits until the machine is done and returns why.
func waitExit(t *testing.T, m Machine) Exit {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(30 * time.Second):
		t.Fatalf("machine does not end; console: %q", m.Console())
	}
	return m.Exit()
}
