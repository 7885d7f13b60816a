package guestagent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openPTY makes a pseudo-terminal (pts(4)): our end, non-blocking, and the process's end.
func openPTY(size *unix.Winsize) (ours, theirs *os.File, err error) {
	ours, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open terminal: %w", err)
	}
	theirs, err = openSlave(ours, size)
	if err != nil {
		ours.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

func openSlave(ours *os.File, size *unix.Winsize) (*os.File, error) {
	var number int
	err := control(ours, func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return fmt.Errorf("unlock terminal: %w", err)
		}
		n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
		if err != nil {
			return fmt.Errorf("name terminal: %w", err)
		}
		number = int(n)
		if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size); err != nil {
			return fmt.Errorf("size terminal: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	theirs, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open terminal: %w", err)
	}
	return theirs, nil
}

func resizePTY(ours *os.File, size *unix.Winsize) error {
	return control(ours, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
}

// control runs f on the descriptor without taking the file out of the poller, as File.Fd would.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
