package template

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestATemplateIsNotCalledDamagedBecauseThisProcessLacksDescriptors(t *testing.T) {
	for errno, want := range map[unix.Errno]bool{
		unix.ENOENT: true, unix.EIO: true,
		unix.EMFILE: false, unix.ENFILE: false, unix.ENOMEM: false, unix.EACCES: false,
	} {
		err := unreadable("x", "memory.img", fmt.Errorf("digest file: %w", &os.PathError{Op: "open", Path: "memory.img", Err: errno}))
		if got := errors.Is(err, ErrDamaged); got != want {
			t.Errorf("%v: damaged %v, want %v: %v", errno, got, want, err)
		}
		if !want && !errors.Is(err, errno) {
			t.Errorf("%v is not in the error: %v", errno, err)
		}
	}
}
