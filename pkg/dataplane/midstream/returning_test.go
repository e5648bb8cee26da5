package midstream

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/returning"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// Without connection tracking each packet of a flow finds its target, which the current one and
// then earlier ones return to the pod.
func TestReturnedFlowsKeepTheirTarget(t *testing.T) {
	for _, asking := range []asking{second, threeWay, everyone} {
		x := newFixtureBy(t, asking, true)
		for _, family := range vip.Families {
			for target := 1; target <= 2 || asking != second && target == 3; target++ {
				t.Run(fmt.Sprintf("%s target %d, %s asked", family, target, asking), func(t *testing.T) {
					want := fmt.Sprint(target)
					x.forward(uint32(4999 + target))
					flow := x.dial(family)
					if got, err := ask(flow); got != want || err != nil {
						t.Fatalf("%q, %v", got, err)
					}
					x.forward(5000)
					before := x.counters()
					for range 3 {
						if got, err := ask(flow); got != want || err != nil {
							t.Fatalf("after the change: %q, %v", got, err)
						}
					}
					after := x.counters()
					// A late ACK of an earlier flow is copied, too.
					if target > 1 && after.Asked < before.Asked+3 || after.Denied != before.Denied {
						t.Errorf("%+v, before %+v", after, before)
					}
					if got, err := ask(x.dial(family)); got != "1" || err != nil {
						t.Errorf("a new flow: %q, %v", got, err)
					}
				})
			}
		}
	}
}

// The client gets the RST of a flow that every target returned.
func TestReturnedDeadFlowsAreReset(t *testing.T) {
	for asking, copies := range map[asking]uint64{second: 2, threeWay: 2, everyone: 3} {
		t.Run(string(asking), func(t *testing.T) {
			x := newFixtureBy(t, asking, true)
			x.forward(5000)
			wantReset(t, x, 0)
			if got := x.counters(); got.Denied != 1 || got.Asked != copies {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A packet that a target returns after the current target or the way of asking changed is sent to
// every target that has not returned it.
func TestReturnedPacketsAskOthersDuringChange(t *testing.T) {
	x := newFixtureBy(t, everyone, true)
	// The host on another network speaks for the first target.
	link := x.links[5000]
	x.attacker.Shell(t, "ip link set eth0 address "+net.HardwareAddr(link[:]).String())
	flow := uint16(40000) // another for each packet: the last target that gets one knows its flow then
	wantAsked := func(step int, want uint64, what string) {
		t.Helper()
		before := x.counters()
		flow++
		packet := tcpSegment(netip.AddrPortFrom(client, flow), netip.AddrPortFrom(vips[0], port), tcpACK|tcpPSH)
		packet[1] = (returning.Ask | returning.Back | byte(step)*returning.AskStep) << 2
		x.send(x.attacker, packet)
		await.True(t, "the last denial", func() bool { return x.counters().Denied == before.Denied+1 })
		if asked := x.counters().Asked - before.Asked; asked != want {
			t.Errorf("%s, step %d: %d targets were asked, want %d", what, step, asked, want)
		}
	}
	for asking, steps := range map[asking][4]uint64{everyone: {3, 3, 3, 2}, threeWay: {2, 1, 0, 2}, second: {2, 1, 0, 2}} {
		x.apply(x.streams(asking), nil)
		for current := uint32(5000); current <= 5002; current++ {
			x.forward(current)
			for step, want := range steps {
				wantAsked(step, want, fmt.Sprintf("%s asked, current target %d", asking, current-4999))
			}
		}
	}
	// The first target leaves the stream for another one.
	streams := x.streams(everyone)
	for family := range streams {
		web := streams[family][0]
		streams[family] = append([]Stream{{
			Name: "other", Size: 2, Seed: 1, FWMarks: map[uint32]plan.LinkAddress{6000: link},
			Everyone: map[uint32]netip.Addr{6000: web.Everyone[5000]},
		}}, web)
		delete(web.FWMarks, 5000)
		delete(web.Everyone, 5000)
	}
	x.apply(streams, nil)
	wantAsked(3, 2, "the target has left")
}

// A packet with a code point of its client does not circulate: a pod without the tables, or of a
// version without them, gets it once.
func TestForgedCodePointsDoNotCirculate(t *testing.T) {
	x := newFixtureBy(t, second, true)
	x.forward(5000)
	if err := Remove(x.conn); err != nil {
		t.Fatal(err)
	}
	returned := lab.NewCapture(t, x.pod, "int1")
	wantReset(t, x, returning.Ask<<2)
	// The capture reads later than the client; the refusal is the last packet of the target.
	await.True(t, "the target's refusal", func() bool {
		return returned.Count(func(p lab.Packet) bool { return !p.Outgoing && p.SrcPort == port }) > 0
	})
	if count := returned.Count(func(p lab.Packet) bool { return !p.Outgoing && p.DstPort == port }); count != 1 {
		t.Errorf("the target returned the packet %d times", count)
	}
}

// wantReset sends a segment of an unknown flow and waits for the RST.
func wantReset(t *testing.T, x *fixture, services byte) {
	t.Helper()
	capture := lab.NewCapture(t, x.client, "eth0")
	packet := tcpSegment(netip.AddrPortFrom(client, 40000), netip.AddrPortFrom(vips[0], port), tcpACK|tcpPSH)
	packet[1] = services // the kernel fills in the checksum
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	x.send(x.client, packet)
	if err := capture.Wait(ctx, func(p lab.Packet) bool { return !p.Outgoing && p.DstPort == 40000 }); err != nil {
		t.Fatal(err)
	}
}
