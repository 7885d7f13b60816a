package guestagent

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// poolInfo is struct rand_pool_info (linux/random.h) with room for the largest seed.
type poolInfo struct {
	entropyCount int32 // bits
	bufSize      int32 // bytes
	buf          [4096]byte
}

const _ = uint(unsafe.Sizeof(poolInfo{})-4104) + uint(4104-unsafe.Sizeof(poolInfo{}))

// addEntropy mixes seed into the kernel's pool and credits all its bits
// (RNDADDENTROPY, random(4)). Preconditions: len(seed) <= 4096.
func addEntropy(fd int, seed []byte) error {
	info := poolInfo{entropyCount: int32(8 * len(seed)), bufSize: int32(len(seed))}
	copy(info.buf[:], seed)
	// SAFETY: the kernel reads 8 + bufSize bytes, all inside info, during the call.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return errno
	}
	return nil
}
