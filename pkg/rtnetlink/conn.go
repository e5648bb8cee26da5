package rtnetlink

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

// dumpAttempts limits the attempts of a dump that concurrent changes interrupt.
const dumpAttempts = 10

// ErrInterrupted is returned if other processes changed the listed objects during every attempt.
var ErrInterrupted = nlmsg.ErrInterrupted

// FamilyAbsent reports whether err means that the kernel lacks the family (ipv6.disable=1).
func FamilyAbsent(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Conn is a pair of rtnetlink sockets in the network namespace of the thread that called Dial. It
// is not safe for concurrent use, and remains usable after a failed exchange.
type Conn struct {
	requests *nlmsg.Socket
	// rules is subscribed to changes of policy rules; see unchanged.
	rules *nlmsg.Socket
	// foreignRuleChanges counts the reads that found rule changes by other processes.
	foreignRuleChanges uint64
	// dumped holds the concatenated objects of the last dump, and ends the end offset of each.
	dumped []byte
	ends   []int
}

// Dial opens the sockets.
func Dial() (*Conn, error) {
	requests, err := nlmsg.Open(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	rules, err := nlmsg.Open(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, errors.Join(err, requests.Close())
	}
	return &Conn{requests: requests, rules: rules}, nil
}

// Close closes the sockets.
func (c *Conn) Close() error { return errors.Join(c.requests.Close(), c.rules.Close()) }

// Port returns the netlink port ID that notifications of changes by this Conn carry.
func (c *Conn) Port() uint32 { return c.requests.Port }

// Request is a request to change one object.
type Request struct {
	nlmsg.Messages
	// operation is a verb phrase for errors, such as "add rule".
	operation string
	object    fmt.Stringer
	// Satisfied reports whether a rejection means that the object already has the requested state.
	Satisfied func(error) bool
}

func exists(err error) bool { return errors.Is(err, unix.EEXIST) }

func absent(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// Do sends requests in order. The first result holds one error per request, which wraps the
// kernel's *nlmsg.Error, or nil. Adding an existing object and deleting a missing one succeed. The
// second result is a failure of the exchange; the outcome of requests without an error is then
// unknown.
func (c *Conn) Do(requests ...Request) ([]error, error) {
	var all nlmsg.Messages
	for i := range requests {
		all.Append(&requests[i].Messages)
	}
	rejected, err := c.requests.Do(&all)
	for i, r := range requests {
		switch {
		case rejected[i] == nil:
		case r.Satisfied != nil && r.Satisfied(rejected[i]):
			rejected[i] = nil
		default:
			rejected[i] = fmt.Errorf("failed to %s %s: %w", r.operation, r.object, rejected[i])
		}
	}
	return rejected, err
}

// Apply sends one request; see Do.
func (c *Conn) Apply(r Request) error {
	rejected, err := c.Do(r)
	return errors.Join(err, rejected[0])
}

// dump returns a dump request with the family-specific header.
func dump(kind uint16, header []byte) *nlmsg.Messages {
	var m nlmsg.Messages
	m.Begin(kind, unix.NLM_F_DUMP, header...)
	return &m
}

// list dumps objects of one kind and repeats an interrupted dump. A list returned with
// ErrInterrupted may be incomplete. Objects are parsed after the dump, because a faster reader is
// interrupted by fewer changes. consistent, unless nil, returns ErrInterrupted if a dump of
// several datagrams is inconsistent.
func list[T any](
	c *Conn, what string, request *nlmsg.Messages, parse func([]byte) (T, error), consistent func() error,
) ([]T, error) {
	err := ErrInterrupted
	for attempt := 0; attempt < dumpAttempts && errors.Is(err, ErrInterrupted); attempt++ {
		c.dumped, c.ends = c.dumped[:0], c.ends[:0]
		var datagrams int
		datagrams, err = c.requests.Dump(request, func(object []byte) {
			c.dumped = append(c.dumped, object...)
			c.ends = append(c.ends, len(c.dumped))
		})
		if err == nil && datagrams > 1 && consistent != nil {
			err = consistent()
		}
	}
	if err != nil {
		err = fmt.Errorf("failed to list %s: %w", what, err)
	}
	objects, begin := make([]T, 0, len(c.ends)), 0
	for _, end := range c.ends {
		x, parseErr := parse(c.dumped[begin:end])
		if parseErr != nil {
			return nil, parseErr
		}
		objects = append(objects, x)
		begin = end
	}
	return objects, err
}

// attributes skips the family-specific header of a message and returns its attributes.
func attributes(data []byte, header int, object string) (nlmsg.Attributes, error) {
	if len(data) < header {
		return nil, fmt.Errorf("%s of %d bytes: %w", object, len(data), io.ErrUnexpectedEOF)
	}
	return data[header:], nil
}

var systemFamilies = [...]uint8{vip.IPv4: unix.AF_INET, vip.IPv6: unix.AF_INET6}

func familyFrom(system uint8) (f vip.Family, ok bool) {
	i := slices.Index(systemFamilies[:], system)
	return vip.Family(max(i, 0)), i >= 0
}
