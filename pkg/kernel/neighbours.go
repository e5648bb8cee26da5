package kernel

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
)

const (
	// maxAsked is how many addresses are looked at; each costs a route look-up.
	maxAsked = 256
	// lookTime is how long nobody must answer until silence is believed. On a
	// network that works the first answer takes less than a millisecond. A lost
	// solicitation is sent again after a second (retrans_time_ms), and its answer
	// then ends the darkness.
	lookTime = 250 * time.Millisecond
	// lookEvery is the time from one look to the next.
	lookEvery = time.Second
	// viewAge is how old a Network may be to be believed.
	viewAge = 2500 * time.Millisecond
)

// pollsAfter are the moments of a look at which the answers are collected.
var pollsAfter = [...]time.Duration{2 * time.Millisecond, 10 * time.Millisecond, 40 * time.Millisecond, 120 * time.Millisecond, lookTime}

// Neighbours finds out whether the networks that lead to some addresses are dark,
// that is, whether nobody on them can be reached any more. It is a task.Task.
//
// It works only while it is asked ([Neighbours.Ask]). A look finds the interface
// that leads to each address, reads its carrier and its neighbours, and has some of
// these answer: the next hops, the default gateway of the interface, those that
// were confirmed last, and some others by chance, up to 12 for each interface. To
// each it sends an empty UDP datagram to port 9 (discard), which most hosts refuse
// by ICMP at once, and it asks the kernel to probe the neighbour now (NUD_PROBE: a
// unicast ARP request or neighbour solicitation), which needs CAP_NET_ADMIN.
// Nothing else is changed in the kernel.
//
// The state of a neighbour that nobody asks says little: it is REACHABLE for 15 to
// 45 s after the last word from it, and STALE when nobody wants anything of it. Nor
// is the age of its last confirmation a proof: TCP confirms a neighbour when it
// sends, on the strength of an acknowledgement that may be older than the break. So
// only an answer to a datagram or to a solicitation counts, and who was confirmed
// last is among those who are asked. Whoever answers makes the network light: also
// one of the addresses asked about, whose host is there then, whatever its services
// do.
//
// Silence is believed after 250 ms, and only if all that were asked were solicited,
// as their state shows (PROBE, INCOMPLETE, FAILED). Without CAP_NET_ADMIN the kernel
// solicits no sooner than 5 s after a datagram to a STALE neighbour and up to 45 s
// later a REACHABLE one. Until then nothing is known unless the carrier is off; an
// answer to a datagram or any new confirmation is light.
//
// If an interface has no neighbours but those asked about, their silence is
// darkness: nobody is left who could tell a dead network from dead hosts. Where all
// targets are one machine, or none is asked beside them, that is a risk to know.
//
// A neighbour may be answered for by somebody nearer (proxy ARP, ARP suppression in
// a fabric), and a network beyond a gateway that answers may be dark: both seem
// light. Static neighbours (PERMANENT) are not asked.
type Neighbours struct {
	log     *slog.Logger
	network latest.Value[Network]
	ready   chan struct{}

	mu sync.Mutex
	// question is what was asked last. Its addresses are never changed in place.
	question question
	asked    latest.Value[question]
}

// question is a list of addresses. Each Ask for others has a number of its own.
type question struct {
	number int
	// epoch is the number of the last question without addresses: what was seen
	// before answers nothing that is asked since.
	epoch int
	addrs []netip.Addr
}

// NewNeighbours returns a Neighbours that is asked nothing.
func NewNeighbours(log *slog.Logger) *Neighbours {
	return &Neighbours{log: log.With("component", "neighbours"), ready: make(chan struct{})}
}

// Ask sets the addresses whose networks are looked at from now on, at once and
// then each second; none ends the looking. Of more than 256 the first count. It
// never blocks; the newest call wins, and one with the same addresses changes
// nothing.
func (n *Neighbours) Ask(addrs []netip.Addr) {
	addrs = addrs[:min(len(addrs), maxAsked)]
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Equal(addrs, n.question.addrs) {
		return
	}
	n.question.number++
	n.question.addrs = slices.Clone(addrs)
	if len(addrs) == 0 {
		n.question.epoch = n.question.number
		n.network.Set(Network{})
	}
	n.asked.Set(n.question)
}

// Network returns what is known. It is updated when somebody was reached, when
// silence is believed, and at least once in each look.
func (n *Neighbours) Network() *latest.Value[Network] { return &n.network }

// publish tells what was seen, unless it was asked for something else since.
func (n *Neighbours) publish(epoch int, x Network) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if epoch == n.question.epoch {
		n.network.Set(x)
	}
}

// Ready is closed once questions are answered.
func (n *Neighbours) Ready() <-chan struct{} { return n.ready }

// String implements task.Task.
func (n *Neighbours) String() string { return "neighbours" }

// Run works until ctx ends, in the network namespace of the calling thread.
// Failures are tried again with the next look.
func (n *Neighbours) Run(ctx context.Context) error {
	close(n.ready)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var l *looker // while asked
	defer func() { l.close() }()
	for {
		q, changed := n.asked.Get()
		var again <-chan time.Time
		if l != nil && (len(q.addrs) == 0 || q.epoch != l.epoch) {
			l.close()
			l = nil
		}
		if len(q.addrs) > 0 {
			if l == nil {
				l = &looker{epoch: q.epoch, links: map[int]*Link{}, publish: n.publish}
			}
			began := time.Now()
			before := l.failures
			err := l.look(ctx, q.addrs, func() bool { return n.asked.Load().epoch != q.epoch })
			if err != nil && before == 0 {
				n.log.Warn("the networks of the targets cannot be looked at", "error", err)
			}
			timer.Reset(time.Until(began.Add(lookEvery)))
			again = timer.C
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-again:
		}
	}
}

// Network is what is known of the networks that lead to some addresses. It is
// never changed after it was published.
type Network struct {
	// Links are the interfaces, by index.
	Links map[int]Link
	// Ways are the interfaces that lead to the addresses asked about; 0: none does.
	Ways map[netip.Addr]int
	// Err says why nothing is known; Failures counts the looks since this is so.
	Err      error
	Failures int
	// At is when this was seen.
	At time.Time
}

// Link is one interface.
type Link struct {
	Name string
	// Carrier is true if the interface is up and the one at the other end, too.
	Carrier bool
	// Mute interfaces have no neighbours to ask: loopback and tunnels. They are
	// dark only without carrier.
	Mute bool
	// Neighbours counts the entries of both families, Failed those among them that
	// do not answer.
	Neighbours, Failed int
	// Confirmed is when somebody asked was last reached, and Witness who; zero: never.
	Confirmed time.Time
	Witness   netip.Addr
	// Silent is when the last look began in which nobody answered though all that
	// were asked had been solicited; zero: the last look did not end so.
	Silent time.Time
	// Asked counts the neighbours that were asked in that look.
	Asked int
	// Unprivileged is true if the kernel did not let us probe.
	Unprivileged bool
}

// Of tells of the network that leads to an address whether it is dark at now: the
// carrier is off, no interface leads there, or nobody was reached since then
// although asked. known is false before a look has ended, when the address was not
// asked about, and when what is known is older than 2.5 s.
func (n Network) Of(addr netip.Addr, now, since time.Time) (dark, known bool, detail string) {
	index, looked := n.Ways[addr]
	switch {
	case n.Err != nil:
		return false, false, n.Err.Error()
	case !looked || now.Sub(n.At) > viewAge:
		return false, false, "not looked at"
	case index == 0:
		return true, true, fmt.Sprintf("there is no way to %s", addr)
	}
	l := n.Links[index]
	switch {
	case !l.Carrier:
		return true, true, fmt.Sprintf("interface %s has no carrier", l.Name)
	case l.Mute:
		return false, true, fmt.Sprintf("interface %s has no neighbours to ask", l.Name)
	case !l.Confirmed.IsZero() && !l.Confirmed.Before(since):
		return false, true, fmt.Sprintf("%s on interface %s was reached", l.Witness, l.Name)
	case !l.Silent.IsZero() && !l.Silent.Before(since):
		return true, true, fmt.Sprintf("none of the neighbours on interface %s answers", l.Name)
	case l.Unprivileged:
		return false, false, fmt.Sprintf("the neighbours on interface %s cannot be probed without CAP_NET_ADMIN", l.Name)
	}
	return false, false, fmt.Sprintf("the neighbours on interface %s are being asked", l.Name)
}

// Seen is when this was seen.
func (n Network) Seen() time.Time { return n.At }

// Dark tells whether the networks of all addresses asked about are dark, and why.
func (n Network) Dark(now, since time.Time) (dark bool, detail string) {
	for addr := range n.Ways {
		dark, _, detail = n.Of(addr, now, since)
		if !dark {
			return false, detail
		}
	}
	return dark, detail
}
