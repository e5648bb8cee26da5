package midstream

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
)

// model is what a pod must do with single packets of flows that began elsewhere.
type model struct {
	*wire
	r       *rapid.T
	asking  asking
	current int
	members map[int]bool
	flows   []*modelFlow
	pending []pendingPacket
}

type modelFlow struct {
	family vip.Family
	port   uint16
	// target has the flow; 0: no target has it.
	target int
	// seen: this pod has seen a packet of the client since the flow moved; decided: then one of the
	// target.
	seen, decided bool
	// protected: since its first packet here the target is asked, so that no RST may reach the client.
	protected bool
	// calm: since then nothing but the flow changed, so that the RST of the last target that is asked
	// must reach the client if no target has the flow.
	calm   bool
	denied map[int]bool
	// earlier: earlier targets were asked, of which denials are counted, not names.
	earlier bool
	last    time.Time
}

// pendingPacket is a packet that a target has not answered.
type pendingPacket struct {
	target int
	flow   *modelFlow
}

// firstPort is below the ports of clients: each flow has another one, whose elements no earlier
// sequence left.
const firstPort = uint16(20000)

// In random sequences of packets and changes, no RST reaches the client of a flow whose target is
// asked, each packet reaches exactly the targets that may have its flow, and the client of a flow
// that no target has gets the RST of the last one.
func TestRandomPackets(t *testing.T) {
	w, flowPort := newWire(t, false), firstPort
	rapid.Check(t, func(r *rapid.T) {
		m := &model{wire: w, r: r, asking: everyone, current: 1, members: map[int]bool{1: true, 2: true, 3: true}}
		m.reset()
		r.Repeat(map[string]func(*rapid.T){
			"flow": func(r *rapid.T) {
				flowPort++
				m.flows = append(m.flows, &modelFlow{
					family: rapid.SampledFrom(vip.Families[:]).Draw(r, "family"), port: flowPort,
					target: rapid.SampledFrom([]int{0, 1, 2, 2, 3}).Draw(r, "target"),
				})
				m.moved(m.flows[len(m.flows)-1])
			},
			"request": func(r *rapid.T) { m.request(m.draw(r)) },
			"answer": func(r *rapid.T) {
				if len(m.pending) > 0 {
					m.answer(rapid.IntRange(0, len(m.pending)-1).Draw(r, "packet"))
				}
			},
			"move": func(r *rapid.T) {
				m.forget()
				if m.asking == everyone {
					m.change(rapid.SampledFrom(slices.Sorted(maps.Keys(m.members))).Draw(r, "current"))
				}
			},
			"ask": func(r *rapid.T) { m.ask(rapid.SampledFrom([]asking{second, threeWay, everyone}).Draw(r, "asking")) },
			"leave": func(r *rapid.T) {
				if m.asking == everyone && len(m.members) == 3 {
					m.leave(rapid.IntRange(1, 3).Draw(r, "target"))
				}
			},
			"return": func(*rapid.T) {
				if len(m.members) < 3 {
					m.join()
				}
			},
		})
		m.finish()
	})
}

// reset forgets flows of an earlier sequence.
func (m *model) reset() {
	m.restore()
	if err := Remove(m.conn); err != nil {
		m.r.Fatal(err)
	}
	m.forget()
	m.change(1)
	m.apply(m.streams(m.asking), nil)
	m.receive()
}

// restore has all targets in the stream again.
func (m *model) restore() {
	for link, number := range m.wire.links {
		m.fixture.links[uint32(4999+number)] = link
	}
}

func (m *model) draw(r *rapid.T) *modelFlow {
	if len(m.flows) == 0 {
		r.Skip("no flow")
	}
	return rapid.SampledFrom(m.flows).Draw(r, "flow")
}

// asked returns the targets that get a packet of an undecided flow.
func (m *model) asked() map[int]bool {
	asked := map[int]bool{m.current: true}
	for number := range m.members {
		switch {
		case m.asking == everyone, number == 2, number == 3 && m.asking == threeWay:
			asked[number] = true
		}
	}
	return asked
}

// moved begins a flow in this pod, which does not know it.
func (m *model) moved(flow *modelFlow) {
	flow.seen, flow.decided, flow.protected, flow.calm = false, false, m.asked()[flow.target], true
	flow.denied = map[int]bool{}
}

// revise notes a change of the asked targets.
func (m *model) revise() {
	asked := m.asked()
	for _, flow := range m.flows {
		flow.calm = false
		flow.protected = flow.protected && asked[flow.target]
	}
}

// forget makes all flows those of another pod.
func (m *model) forget() {
	if err := m.kernel.FlushConntrack([]uint32{5000, 5001, 5002}); err != nil {
		m.r.Fatal(err)
	}
	for _, flow := range m.flows {
		// The elements of its earlier time here are younger than memory.
		wasProtected, again := flow.protected, !flow.last.IsZero()
		m.moved(flow)
		flow.protected, flow.calm = flow.protected && wasProtected, !again
	}
}

// change makes another target the current one.
func (m *model) change(current int) {
	m.forward(uint32(4999 + current))
	if current == m.current {
		return
	}
	m.current = current
	for _, flow := range m.flows {
		flow.protected = flow.protected && !flow.earlier
	}
	m.revise()
}

func (m *model) ask(asking asking) {
	// A stream that does not ask all targets has one that is current and others that were it before.
	if asking != everyone && (m.current != 1 || len(m.members) < 3) {
		return
	}
	before := m.streams(m.asking)
	m.asking = asking
	m.apply(m.streams(asking), &before)
	m.revise()
}

func (m *model) leave(number int) {
	before := m.streams(m.asking)
	delete(m.members, number)
	delete(m.fixture.links, uint32(4999+number))
	m.pending = slices.DeleteFunc(m.pending, func(packet pendingPacket) bool { return packet.target == number })
	m.flows = slices.DeleteFunc(m.flows, func(flow *modelFlow) bool { return flow.target == number })
	m.pending = slices.DeleteFunc(m.pending, func(packet pendingPacket) bool { return packet.flow.target == number })
	if number == m.current {
		if err := m.kernel.FlushConntrack([]uint32{uint32(4999 + number)}); err != nil {
			m.r.Fatal(err)
		}
		// The entries of undecided flows had its mark.
		for _, flow := range m.flows {
			flow.seen = flow.seen && flow.decided
		}
		m.change(slices.Min(slices.Collect(maps.Keys(m.members))))
	}
	m.apply(m.streams(m.asking), &before)
	m.revise()
}

func (m *model) join() {
	before := m.streams(m.asking)
	m.restore()
	m.members = map[int]bool{1: true, 2: true, 3: true}
	m.apply(m.streams(m.asking), &before)
	m.revise()
}

func (m *model) client(flow *modelFlow) netip.AddrPort {
	return netip.AddrPortFrom(clients[flow.family], flow.port)
}

// request sends a packet of the client and checks which targets get it.
func (m *model) request(flow *modelFlow) {
	m.expire(flow)
	flow.seen, flow.last, flow.earlier = true, time.Now(), flow.earlier || m.asking != everyone
	want := m.asked()
	if flow.decided {
		want = map[int]bool{flow.target: true}
	}
	m.transmit(m.wire.client, flow.family,
		tcpSegment(m.client(flow), netip.AddrPortFrom(vips[flow.family], port), tcpACK|tcpPSH))
	_, targets := m.receive()
	got := map[int]bool{}
	for number, frames := range targets {
		for _, f := range frames {
			if f.from != flow.port || f.family != flow.family {
				m.r.Fatalf("target %d got a packet of port %d", number, f.from)
			}
			got[number] = true
			m.pending = append(m.pending, pendingPacket{number, flow})
		}
	}
	if !maps.Equal(got, want) {
		m.r.Fatalf("targets %v got a packet of %+v, want %v", got, *flow, want)
	}
}

// answer sends the answer of a target: data, or a RST without the flow.
func (m *model) answer(i int) {
	packet := m.pending[i]
	m.pending = slices.Delete(m.pending, i, i+1)
	flow, flags := packet.flow, byte(tcpRST)
	m.expire(flow)
	if packet.target == flow.target {
		flags = tcpPSH | tcpACK
	}
	m.transmit(m.targets[packet.target], flow.family,
		tcpSegment(netip.AddrPortFrom(vips[flow.family], port), m.client(flow), flags))
	answers, _ := m.receive()
	reset, data := false, false
	for _, f := range answers {
		if f.to != flow.port || f.family != flow.family {
			m.r.Fatalf("the client got a packet for port %d", f.to)
		}
		reset, data = reset || f.isRST(), data || !f.isRST()
	}
	if packet.target == flow.target {
		if !data {
			m.r.Fatalf("the client of %+v got no data", *flow)
		}
		flow.decided = flow.decided || flow.seen
		return
	}
	flow.denied[packet.target] = true
	if reset && flow.protected {
		m.r.Fatalf("target %d reset %+v", packet.target, *flow)
	}
	if wanted := maps.Equal(flow.denied, m.asked()); flow.calm && flow.target == 0 && wanted != reset {
		m.r.Fatalf("the client got a RST of target %d: %v, want %v: %+v", packet.target, reset, wanted, *flow)
	}
	if reset {
		m.flows = slices.DeleteFunc(m.flows, func(f *modelFlow) bool { return f == flow })
		m.pending = slices.DeleteFunc(m.pending, func(p pendingPacket) bool { return p.flow == flow })
	}
}

// expire ends the promises for a flow whose elements may have expired on a slow machine.
func (m *model) expire(flow *modelFlow) {
	if !flow.last.IsZero() && time.Since(flow.last) > memory/2 {
		flow.protected, flow.calm = false, false
	}
}

// finish repeats the request of each protected flow until its target has answered.
func (m *model) finish() {
	for _, flow := range slices.Clone(m.flows) {
		if !flow.protected || !m.members[flow.target] {
			continue
		}
		m.request(flow)
		for !flow.decided {
			i := slices.IndexFunc(m.pending, func(packet pendingPacket) bool { return packet.flow == flow })
			if i < 0 {
				m.r.Fatalf("%+v is not decided", *flow)
			}
			m.answer(i)
		}
		m.request(flow)
	}
}

// Without connection tracking, and of SCTP, each packet visits every target that may have its flow
// until one does not return it: the current one at last.
func TestRandomReturns(t *testing.T) {
	for _, tracking := range []bool{false, true} {
		t.Run(fmt.Sprintf("connection tracking %v", tracking), func(t *testing.T) {
			w, flowPort := newWire(t, !tracking), firstPort
			protocols := []int{unix.IPPROTO_SCTP, unix.IPPROTO_TCP}
			if tracking {
				protocols = protocols[:1]
			}
			rapid.Check(t, func(r *rapid.T) {
				asking := rapid.SampledFrom([]asking{second, threeWay, everyone}).Draw(r, "asking")
				m := &model{wire: w, r: r, asking: asking, current: 1, members: map[int]bool{1: true, 2: true, 3: true}}
				if asking == everyone {
					m.current = rapid.IntRange(1, 3).Draw(r, "current")
				}
				m.forward(uint32(4999 + m.current))
				m.apply(m.streams(asking), nil)
				flowPort++
				family := rapid.SampledFrom(vip.Families[:]).Draw(r, "family")
				owner := rapid.IntRange(0, 3).Draw(r, "target")
				from, to := netip.AddrPortFrom(clients[family], flowPort), netip.AddrPortFrom(vips[family], port)
				packet := tcpSegment(from, to, tcpACK|tcpPSH)
				if rapid.SampledFrom(protocols).Draw(r, "protocol") == unix.IPPROTO_SCTP {
					packet = sctpData(from, to)
				}
				m.returns(family, packet, owner)
			})
		})
	}
}

// returns sends a packet that every target but the owner returns. One target may get it twice: the
// current one, at first and in the order of all, or the only earlier one.
func (m *model) returns(family vip.Family, packet []byte, owner int) {
	sender, visited, again := m.wire.client, map[int]bool{}, false
	for {
		m.transmit(sender, family, packet)
		_, targets := m.receive()
		var number int
		var got []frame
		for candidate, frames := range targets {
			if len(frames) > 0 {
				number, got = candidate, append(got, frames...)
			}
		}
		if len(got) != 1 {
			m.r.Fatalf("%d targets got the packet", len(got))
		}
		point := got[0].point
		if number == owner {
			return
		}
		if point == 0 { // a target answers with a RST
			if visited[owner] || m.asked()[owner] || number != m.current || !maps.Equal(visited, m.asked()) {
				m.r.Fatalf("target %d got the packet last, after %v", number, visited)
			}
			return
		}
		twice := m.asking == everyone && number == m.current || m.asking == second && number == 2
		if visited[number] && (again || !twice) || point&returning.Ask != returning.Ask {
			m.r.Fatalf("target %d got the packet with code point %#x after %v", number, point, visited)
		}
		again = again || visited[number]
		visited[number], sender = true, m.targets[number]
		packet = got[0].withPoint(point | returning.Back)
	}
}
