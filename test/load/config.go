package load

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of a generator. They keep a mistake in a test from overloading the machine and are far
// above the needs of the scenarios.
const (
	MaxRate    = 2000             // requests per second
	MaxFlows   = 1000             // long-lived flows
	MaxTimeout = 30 * time.Second // of a request, or of a flow without an answer
	MaxTime    = 30 * time.Minute // of a whole run
)

// Defaults of Config.
const (
	// DefaultTimeout ends before the second retransmission of a SYN, after 3 s (RFC 6298): a VIP that is
	// dark for 1 s fails a request, and a machine that stops for a moment does not. Without the lab's
	// sysctl Linux since 6.5 sends a third SYN before, so that only 2 s fail one.
	DefaultTimeout = 2900 * time.Millisecond
	// DefaultPace is how often a flow exchanges a frame.
	DefaultPace = 20 * time.Millisecond
	// DefaultSilence is how long a flow may be without an answer: TCP retransmits after 0.2, 0.6,
	// 1.4, 3 and 6.2 s (RFC 6298 with Linux's minimum RTO), so that a flow that still works has had
	// five chances.
	DefaultSilence = 10 * time.Second
)

// Config configures the traffic of a Generator.
type Config struct {
	// Requests are the addresses that get requests, in turn; Rate is the number of requests per
	// second over all addresses. No requests are sent when either is empty.
	Requests []netip.AddrPort
	Rate     int
	// Timeout is how long a request may take from the first SYN to the end of its answer, without
	// up to three long stalls of this process; 0 is DefaultTimeout.
	Timeout time.Duration

	// Flows is the number of long-lived flows, to the addresses of FlowsTo in turn. No flow is
	// opened when either is empty.
	Flows   int
	FlowsTo []netip.AddrPort
	// Downloads is how many of the flows only receive: the application sends a frame after each Pace,
	// and the client nothing but its first one.
	Downloads int
	// Pace is the time between two frames of a flow, if the first one was answered by then; 0 is
	// DefaultPace.
	Pace time.Duration
	// Silence is how long a flow may be without an answer before it counts as
	// broken; 0 is DefaultSilence.
	Silence time.Duration
	// Redial opens a new flow in the place of a broken one.
	Redial bool

	// For is the time after which sending ends automatically; 0 means MaxTime, which is also the
	// maximum.
	For time.Duration
	// Inside runs the function that creates a socket, for example lab.NetNS.Do; nil creates sockets
	// in the current namespace.
	Inside func(func() error) error
	// Observe, if set, is called with the outcome of each request, by several goroutines.
	Observe func(Outcome)

	linear uint32 // of linearTimeouts: as many retransmissions do not double the time to the next one
}

// Outcome is the outcome of one request.
type Outcome struct {
	To   netip.AddrPort
	Sent time.Time
	Err  error // nil if it was answered
}

// complete fills in the defaults and returns an error that names each value out of bounds.
func (c *Config) complete() error {
	for _, d := range []struct {
		value    *time.Duration
		fallback time.Duration
	}{{&c.Timeout, DefaultTimeout}, {&c.Pace, DefaultPace}, {&c.Silence, DefaultSilence}, {&c.For, MaxTime}} {
		if *d.value == 0 {
			*d.value = d.fallback
		}
	}
	var errs []error
	within := func(what string, value, low, high any, ok bool) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s is %v, want %v to %v", what, value, low, high))
		}
	}
	within("rate", c.Rate, 0, MaxRate, c.Rate >= 0 && c.Rate <= MaxRate)
	within("flows", c.Flows, 0, MaxFlows, c.Flows >= 0 && c.Flows <= MaxFlows)
	within("timeout", c.Timeout, time.Millisecond, MaxTimeout, c.Timeout >= time.Millisecond && c.Timeout <= MaxTimeout)
	within("downloads", c.Downloads, 0, c.Flows, c.Downloads >= 0 && c.Downloads <= c.Flows)
	within("silence", c.Silence, time.Millisecond, MaxTimeout, c.Silence >= time.Millisecond && c.Silence <= MaxTimeout)
	within("pace", c.Pace, time.Millisecond, MaxTimeout, c.Pace >= time.Millisecond && c.Pace <= MaxTimeout)
	within("time", c.For, time.Millisecond, MaxTime, c.For >= time.Millisecond && c.For <= MaxTime)
	if len(c.Requests) == 0 {
		c.Rate = 0
	}
	if len(c.FlowsTo) == 0 {
		c.Flows = 0
	}
	if c.Rate == 0 && c.Flows == 0 {
		errs = append(errs, errors.New("neither requests nor flows"))
	}
	inside := c.Inside
	if inside == nil {
		inside = func(f func() error) error { return f() }
	}
	errs = append(errs, inside(func() error { c.linear = linearTimeouts(); return nil }))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	return nil
}

// dial opens a connection whose socket was created inside.
func (c *Config) dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1}
	if c.Inside != nil {
		d.Control = c.swap
	}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	if err := c.late(conn.(*net.TCPConn)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// sentAgain returns how often the kernel sends a SYN again before the timeout.
func (c *Config) sentAgain() (sent uint32) {
	wait := time.Second
	for after := wait; after < c.Timeout; after += wait {
		if sent++; sent > c.linear {
			wait *= 2
		}
	}
	return sent
}

// linearTimeouts returns net.ipv4.tcp_syn_linear_timeouts of the thread's namespace, which Linux
// has since 6.5; 0 without it.
func linearTimeouts() uint32 {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_syn_linear_timeouts")
	if err != nil {
		return 0
	}
	number, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 8)
	return uint32(number)
}

// late returns an error if the SYN that was answered left after the timeout: the kernel sends it
// again after 1, 3 and 7 s, or first some times each second, also while this process stalls.
func (c *Config) late(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var info *unix.TCPInfo
	var errInfo error
	if err := raw.Control(func(fd uintptr) {
		info, errInfo = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); err != nil || errInfo != nil {
		return errors.Join(err, errInfo)
	}
	if info.Total_retrans > c.sentAgain() {
		return fmt.Errorf("connected by the SYN after %d lost ones, and not within %v", info.Total_retrans, c.Timeout)
	}
	return nil
}

// swap replaces the socket, which was created in this namespace and is not yet connected, by one
// that was created inside. So only the creation needs a thread in the other namespace, and
// waiting for an answer does not.
func (c *Config) swap(network, _ string, raw syscall.RawConn) error {
	family := unix.AF_INET
	if network == "tcp6" {
		family = unix.AF_INET6
	}
	var inside int
	if err := c.Inside(func() (err error) {
		inside, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(inside)
	var errDup error
	if err := raw.Control(func(fd uintptr) { errDup = unix.Dup3(inside, int(fd), unix.O_CLOEXEC) }); err != nil {
		return err
	}
	return errDup
}
