package frontend

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// scriptedSource returns the update that the benchmark has set.
type scriptedSource struct {
	changed chan struct{}
	update  readiness.Update
	taken   time.Time
}

func (s *scriptedSource) Changed() <-chan struct{} { return s.changed }

func (s *scriptedSource) Take() readiness.Update {
	s.taken = time.Now()
	return s.update
}

// answerBGP is BIRD's side of one session, which discards all updates.
func answerBGP(l net.Listener) error {
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	open, err := bgp.NewBGPOpenMessage(64512, 65535, netip.MustParseAddr("192.0.2.1"),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability([]bgp.ParameterCapabilityInterface{
			bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC), bgp.NewCapFourOctetASNumber(64512),
		})})
	if err != nil {
		return err
	}
	for _, m := range []*bgp.BGPMessage{open, bgp.NewBGPKeepAliveMessage()} {
		b, err := m.Serialize()
		if err != nil {
			return err
		}
		if _, err := conn.Write(b); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, conn)
	return err
}

// BenchmarkTakeToWrite measures from the Take of an update until the UPDATEs of its decision are
// written, the gate included: the metric ns/write. The goal is 3 ms for 10 000 VIPs.
func BenchmarkTakeToWrite(b *testing.B) {
	const all = 50_000
	for _, n := range []int{1, 1000, 10_000, all} {
		b.Run(fmt.Sprintf("changed=%d", n), func(b *testing.B) { benchmarkTakeToWrite(b, n) })
	}
	b.Run(fmt.Sprintf("changed=1 of %d", all), func(b *testing.B) { benchmarkTakeToWrite(b, all, 1) })
}

func benchmarkTakeToWrite(b *testing.B, n int, changed ...int) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	peer := make(chan error, 1)
	go func() { peer <- answerBGP(l) }()
	written := make(chan time.Time, 1)
	a := announce.New(announce.Options{
		Local: netip.MustParseAddr("127.0.0.1"), Peer: netip.MustParseAddrPort(l.Addr().String()), PeerAS: 64512,
		HoldTime: 65535 * time.Second, OnWritten: func(_, at time.Time, _ uint64) { written <- at },
	})
	vips := make([]vip.VIP, n)
	update := readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 1}, Complete: true, Synced: true, Open: true,
		LeaseEnd: time.Now().Add(time.Hour),
	}
	for i := range vips {
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
		if vips[i], err = vip.FromPrefix(prefix); err != nil {
			b.Fatal(err)
		}
		update.Changed = append(update.Changed, readiness.VIPReadiness{VIP: vips[i], State: vip.Ready})
	}
	o, _ := testObserver()
	s := &scriptedSource{changed: make(chan struct{}), update: update}
	up := bird.State{At: time.Now().Add(time.Hour), Alive: true}
	for _, f := range vip.Families {
		up.Gateways = append(up.Gateways, bird.GatewayState{Family: f, Up: true, Usable: true})
	}
	c := &controller{
		gate: gate.New(gate.Options{NoFlapBackoff: true}), source: s, bird: latest.New(up),
		kernel: latest.New(kernel.Confirmed{VIPs: vip.NewSet(vips...)}), announcer: a, session: a.Up(), observer: o,
		attractor: &attractor{current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}},
		commands:  make(chan command), ready: make(chan struct{}),
	}
	c.gate.Configure(vips)
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 2)
	go func() { ended <- a.Run(ctx) }()
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
		<-ended
		l.Close()
		<-peer
	}()
	s.changed <- struct{}{}
	<-written // the table is empty until the update, so one write contains every VIP
	s.update.Complete = false
	if len(changed) > 0 {
		s.update.Changed = s.update.Changed[:changed[0]]
	}
	var took time.Duration
	var samples []time.Duration
	for k := 0; b.Loop(); k++ {
		s.update.Changed = slices.Clone(s.update.Changed) // the observer keeps it
		for i := range s.update.Changed {
			s.update.Changed[i].State = vip.State(k % 2) // NotReady, Ready
		}
		s.update.Position.Revision++
		s.changed <- struct{}{}
		d := (<-written).Sub(s.taken)
		took, samples = took+d, append(samples, d)
		// The controller accepts a command after the pass has ended.
		if err := c.Do(ctx, func(*gate.Gate, time.Time) {
			o.queue.Drain(func([]input, int) {})
		}); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(samples)
	b.ReportMetric(float64(took)/float64(len(samples)), "ns/write")
	b.ReportMetric(float64(samples[len(samples)/2]), "median-ns/write")
}
