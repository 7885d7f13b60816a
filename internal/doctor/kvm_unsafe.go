package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls of Documentation/virt/kvm/api.rst that one vCPU without devices needs.
const (
	kvmGetAPIVersion     = 0xae00
	kvmCreateVM          = 0xae01
	kvmGetVCPUMmapSize   = 0xae04
	kvmGetSupportedCPUID = 0xc008ae05
	kvmCreateVCPU        = 0xae41
	kvmSetMemoryRegion   = 0x4020ae46
	kvmSetTSSAddr        = 0xae47
	kvmRun               = 0xae80
	kvmSetRegs           = 0x4090ae82
	kvmGetSregs          = 0x8138ae83
	kvmSetSregs          = 0x4138ae84
	kvmSetCPUID2         = 0x4008ae90

	kvmExitHLT       = 5 // kvm_run.exit_reason of an executed HLT
	kvmOffExitReason = 8 // offset of exit_reason in struct kvm_run
)

type kvmMemoryRegion struct {
	slot, flags                        uint32
	guestPhysAddr, size, userspaceAddr uint64
}

type kvmRegs struct {
	rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp uint64
	r8, r9, r10, r11, r12, r13, r14, r15   uint64
	rip, rflags                            uint64
}

type kvmSegment struct {
	base                                                     uint64
	limit                                                    uint32
	selector                                                 uint16
	kind, present, dpl, db, s, l, g, avl, unusable, _padding uint8
}

type kvmTable struct {
	base  uint64
	limit uint16
	_     [3]uint16
}

type kvmSregs struct {
	cs, ds, es, fs, gs, ss, tr, ldt         kvmSegment
	gdt, idt                                kvmTable
	cr0, cr2, cr3, cr4, cr8, efer, apicBase uint64
	interruptBitmap                         [4]uint64
}

type kvmCPUID struct {
	count, _ uint32
	entries  [256][10]uint32 // struct kvm_cpuid_entry2 is 40 bytes
}

// The sizes that the ioctl numbers above encode.
const (
	_ = uint(unsafe.Sizeof(kvmMemoryRegion{})-32) + uint(32-unsafe.Sizeof(kvmMemoryRegion{}))
	_ = uint(unsafe.Sizeof(kvmRegs{})-144) + uint(144-unsafe.Sizeof(kvmRegs{}))
	_ = uint(unsafe.Sizeof(kvmSregs{})-312) + uint(312-unsafe.Sizeof(kvmSregs{}))
	_ = uint(unsafe.Sizeof(kvmCPUID{})-(8+256*40)) + uint((8+256*40)-unsafe.Sizeof(kvmCPUID{}))
)

// The tiny machine's memory: three levels of page tables that map the first
// 2 MiB one to one, then the code.
const (
	tinyPML4   = 0x1000
	tinyPDPT   = 0x2000
	tinyPD     = 0x3000
	tinyCode   = 0x4000
	tinyMemory = 0x10000
)

// errVCPUSlow is returned when the loop has not finished within its limit.
var errVCPUSlow = errors.New("the loop did not finish in time")

// timeLongModeLoop counts a 64-bit register down from n to zero on a vCPU of
// its own and returns how long KVM_RUN took. It gives up after limit.
//
// The vCPU runs on a locked OS thread that is never handed back: KVM ties a vCPU
// to the thread that first ran it. A signal to that thread is what ends a KVM_RUN
// that takes too long.
func timeLongModeLoop(n uint32, limit time.Duration) (time.Duration, error) {
	type outcome struct {
		took time.Duration
		err  error
	}
	var tid atomic.Int64
	var expired atomic.Bool
	done := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		tid.Store(int64(unix.Gettid()))
		took, err := runTinyMachine(n, &expired)
		done <- outcome{took, err}
	}()

	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	select {
	case o := <-done:
		return o.took, o.err
	case <-deadline.C:
	}
	expired.Store(true)
	// SIGURG is the signal that Go's own runtime uses and ignores when it has no
	// meaning. Sent again and again, because one that arrives just before
	// KVM_RUN is entered would be lost.
	for range 100 {
		if err := unix.Tgkill(unix.Getpid(), int(tid.Load()), unix.SIGURG); err != nil {
			break
		}
		select {
		case o := <-done:
			return o.took, o.err
		case <-time.After(10 * time.Millisecond):
		}
	}
	// The kernel does not let go of the vCPU. Nothing can be done from here; the
	// thread ends with the process.
	return 0, errVCPUSlow
}

// runTinyMachine builds the machine, runs it to its HLT and tears it down.
func runTinyMachine(n uint32, expired *atomic.Bool) (time.Duration, error) {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer dev.Close()
	kvm := int(dev.Fd())
	if v, err := ioctl(kvm, kvmGetAPIVersion, 0); err != nil || v != 12 {
		return 0, fmt.Errorf("KVM_GET_API_VERSION is %d, want 12: %w", v, err)
	}
	vm, err := ioctl(kvm, kvmCreateVM, 0)
	if err != nil {
		return 0, fmt.Errorf("KVM_CREATE_VM: %w", err)
	}
	defer unix.Close(vm)
	// Intel hosts without unrestricted guest want three pages for a TSS; below 4 GiB, outside our memory.
	if _, err := ioctl(vm, kvmSetTSSAddr, 0xfffbd000); err != nil {
		return 0, fmt.Errorf("KVM_SET_TSS_ADDR: %w", err)
	}
	mem, err := unix.Mmap(-1, 0, tinyMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, fmt.Errorf("map the machine's memory: %w", err)
	}
	defer unix.Munmap(mem)
	writeTinyMachine(mem, n)
	// SAFETY: mem is mapped memory that the collector never moves; it is unmapped
	// after the VM's descriptors are closed (defers run in reverse, but KVM pins
	// its own view by address and the vCPU has returned by then).
	region := kvmMemoryRegion{size: tinyMemory, userspaceAddr: uint64(uintptr(unsafe.Pointer(&mem[0])))}
	if err := ioctlPtr(vm, kvmSetMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return 0, fmt.Errorf("KVM_SET_USER_MEMORY_REGION: %w", err)
	}
	vcpu, err := ioctl(vm, kvmCreateVCPU, 0)
	if err != nil {
		return 0, fmt.Errorf("KVM_CREATE_VCPU: %w", err)
	}
	defer unix.Close(vcpu)
	size, err := ioctl(kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return 0, fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", err)
	}
	run, err := unix.Mmap(vcpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("map kvm_run: %w", err)
	}
	defer unix.Munmap(run)
	if err := enterLongMode(kvm, vcpu); err != nil {
		return 0, err
	}
	return runToHalt(vcpu, run, expired)
}

// writeTinyMachine fills the machine's memory: page tables and the loop.
func writeTinyMachine(mem []byte, n uint32) {
	const present, writable, large = 1, 2, 1 << 7
	binary.LittleEndian.PutUint64(mem[tinyPML4:], tinyPDPT|present|writable)
	binary.LittleEndian.PutUint64(mem[tinyPDPT:], tinyPD|present|writable)
	binary.LittleEndian.PutUint64(mem[tinyPD:], present|writable|large)       // 0..2 MiB
	code := append([]byte{0xb9}, binary.LittleEndian.AppendUint32(nil, n)...) // mov ecx, n (clears the upper half of rcx)
	code = append(code,
		0x48, 0xff, 0xc9, // dec rcx: in 16- or 32-bit mode this would be two other instructions
		0x75, 0xfb, // jnz -5
		0xf4, // hlt
	)
	copy(mem[tinyCode:], code)
}

// enterLongMode gives the vCPU the host's CPUID and the registers of a CPU that
// has already switched to 64-bit mode with paging on.
func enterLongMode(kvm, vcpu int) error {
	cpuid := kvmCPUID{count: 256}
	if err := ioctlPtr(kvm, kvmGetSupportedCPUID, unsafe.Pointer(&cpuid)); err != nil {
		return fmt.Errorf("KVM_GET_SUPPORTED_CPUID: %w", err)
	}
	if err := ioctlPtr(vcpu, kvmSetCPUID2, unsafe.Pointer(&cpuid)); err != nil {
		return fmt.Errorf("KVM_SET_CPUID2: %w", err)
	}
	var s kvmSregs
	if err := ioctlPtr(vcpu, kvmGetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("KVM_GET_SREGS: %w", err)
	}
	data := kvmSegment{limit: 0xffffffff, selector: 2 << 3, kind: 3, present: 1, s: 1, db: 1, g: 1}
	s.cs = kvmSegment{limit: 0xffffffff, selector: 1 << 3, kind: 11, present: 1, s: 1, l: 1, g: 1}
	s.ds, s.es, s.fs, s.gs, s.ss = data, data, data, data, data
	s.cr0 = 1<<31 | 1<<5 | 1<<4 | 1<<0 // PG, NE, ET, PE
	s.cr3 = tinyPML4
	s.cr4 = 1 << 5        // PAE
	s.efer = 1<<10 | 1<<8 // LMA, LME
	if err := ioctlPtr(vcpu, kvmSetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("KVM_SET_SREGS: %w", err)
	}
	regs := kvmRegs{rip: tinyCode, rflags: 2}
	if err := ioctlPtr(vcpu, kvmSetRegs, unsafe.Pointer(&regs)); err != nil {
		return fmt.Errorf("KVM_SET_REGS: %w", err)
	}
	return nil
}

// runToHalt runs the vCPU until it halts. A signal makes KVM_RUN return EINTR;
// then it goes on unless the time is up.
func runToHalt(vcpu int, run []byte, expired *atomic.Bool) (time.Duration, error) {
	start := time.Now()
	for {
		_, err := ioctl(vcpu, kvmRun, 0)
		switch {
		case err == nil:
			if reason := binary.LittleEndian.Uint32(run[kvmOffExitReason:]); reason != kvmExitHLT {
				return 0, fmt.Errorf("KVM_RUN left with reason %d instead of the HLT (%d)", reason, kvmExitHLT)
			}
			return time.Since(start), nil
		case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("KVM_RUN: %w", err)
		case expired.Load():
			return 0, errVCPUSlow
		}
	}
}

// timeNativeLoop counts down from n on this CPU: what timeLongModeLoop is
// compared with.
func timeNativeLoop(n uint32) time.Duration {
	start := time.Now()
	for i := uint64(n); i != 0; i-- {
	}
	return time.Since(start)
}

// ioctl issues a request whose argument is a number and returns its result.
func ioctl(fd int, request, arg uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}

// ioctlPtr issues a request whose argument is a structure.
//
// SAFETY: p points to a structure of the size that the request encodes, alive
// and unmoved during the call: it is converted in the argument list of Syscall.
func ioctlPtr(fd int, request uintptr, p unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(p)); errno != 0 {
		return errno
	}
	return nil
}
