package healthcheck

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// send sends the query of a probe. The results are those of start.
func (connector *connector) send(socket *socket, probe probe) (o outcome, ended bool) {
	socket.query = probe.plan.newQuery()
	request := socket.query.request
	// A raw system call for the reason of connect: a nearby target receives within it.
	_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(socket.fd), uintptr(unsafe.Pointer(&request[0])),
		uintptr(len(request)))
	if errno != 0 {
		connector.close(socket)
		return probe.plan.failure(os.NewSyscallError("write", errno)), true
	}
	connector.await(socket, probe)
	return outcome{}, false
}

// receive returns the function that judges the packets, or the ICMP error, that a socket received.
func (connector *connector) receive(socket *socket) func(uint32) (outcome, bool) {
	return func(uint32) (outcome, bool) {
		plan := socket.probe.plan
		for {
			length, err := unix.Read(socket.fd, connector.packet[:])
			switch err {
			case nil:
				judged, final := socket.query.answer(connector.packet[:length])
				if final {
					return judged, true
				}
				socket.late = judged
			case unix.EAGAIN:
				return outcome{}, false // the event of an earlier check
			case unix.EINTR:
			default:
				failure, _ := plan.icmpFailure(socket.fd, socket.query, plan.failure(os.NewSyscallError("read", err)))
				return failure, true
			}
		}
	}
}

// drain discards late packets, and reports whether the socket, without a port, can be used again.
func (connector *connector) drain(socket *socket) bool {
	for {
		switch _, err := unix.Read(socket.fd, connector.packet[:]); err {
		case nil, unix.EINTR:
		default:
			return err == unix.EAGAIN
		}
	}
}
