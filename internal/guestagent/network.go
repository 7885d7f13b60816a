package guestagent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// What QEMU's user network gives every guest, by definition the same for all.
const (
	networkDevice = "eth0"
	networkPrefix = 24
)

var (
	networkAddress = [4]byte{10, 0, 2, 15}
	networkGateway = [4]byte{10, 0, 2, 2}
)

// SetInternet is described at System. The name server is in the image's resolv.conf.
func (LinuxSystem) SetInternet(up bool) error {
	if _, err := net.InterfaceByName(networkDevice); err != nil {
		return nil //nolint:nilerr // no network device: the host decided for good
	}
	if !up {
		return setFlags(networkDevice, 0, unix.IFF_UP)
	}
	if err := setAddress(networkDevice); err != nil {
		return fmt.Errorf("set address of %s: %w", networkDevice, err)
	}
	if err := setFlags(networkDevice, unix.IFF_UP, 0); err != nil {
		return fmt.Errorf("raise %s: %w", networkDevice, err)
	}
	if err := addDefaultRoute(); err != nil {
		return fmt.Errorf("route to %v: %w", networkGateway, err)
	}
	return nil
}

// withInterface runs f with a socket and a request that names the interface (netdevice(7)).
func withInterface(name string, f func(fd int, req *unix.Ifreq) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	return f(fd, req)
}

func setFlags(name string, set, clear uint16) error {
	return withInterface(name, func(fd int, req *unix.Ifreq) error {
		if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
			return err
		}
		req.SetUint16(req.Uint16()&^clear | set)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
	})
}

func setAddress(name string) error {
	return withInterface(name, func(fd int, req *unix.Ifreq) error {
		if err := req.SetInet4Addr(networkAddress[:]); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, req); err != nil {
			return err
		}
		if err := req.SetInet4Addr(net.CIDRMask(networkPrefix, 32)); err != nil {
			return err
		}
		return unix.IoctlIfreq(fd, unix.SIOCSIFNETMASK, req)
	})
}

// addDefaultRoute is "ip route replace default via GATEWAY" (rtnetlink(7)).
func addDefaultRoute() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, routeRequest(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, os.Getpagesize())
	n, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(buf[4:]) != unix.NLMSG_ERROR {
		return errors.New("rtnetlink: unexpected answer")
	}
	if errno := -int32(binary.NativeEndian.Uint32(buf[unix.SizeofNlMsghdr:])); errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}

// routeRequest is a struct nlmsghdr, a struct rtmsg and the attribute RTA_GATEWAY.
func routeRequest() []byte {
	const size = unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + 4
	m := make([]byte, 0, size)
	m = binary.NativeEndian.AppendUint32(m, size)
	m = binary.NativeEndian.AppendUint16(m, unix.RTM_NEWROUTE)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	m = binary.NativeEndian.AppendUint32(m, 1) // sequence number
	m = binary.NativeEndian.AppendUint32(m, 0) // to the kernel
	m = append(m, unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST, 0, 0, 0, 0)
	m = binary.NativeEndian.AppendUint16(m, unix.SizeofRtAttr+4)
	m = binary.NativeEndian.AppendUint16(m, unix.RTA_GATEWAY)
	return append(m, networkGateway[:]...)
}
