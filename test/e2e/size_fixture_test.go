package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

const (
	editRate  = 10 // edits of the trench file a second
	writeRate = 20 // transactions of the other process a second
	// leastEffects: a program reads the file after a burst of edits, and edits of one object replace
	// one another, so that the effect of one in so many must be seen.
	leastEffects = 50

	// visitors is how many VIPs, and targets, of the trench file leave it later. The data plane has
	// room for reserved VIPs that visit or drain, and as many addresses are for targets that visit.
	visitors = 16
	reserved = 64

	// checkPorts are the ports of the check that is edited, in turn.
	firstCheckPort, checkPorts = 6000, 16
)

// editKind is a kind of edits of the trench file.
type editKind int

const (
	policyEdit editKind = iota
	targetJoins
	targetLeaves
	streamEdit
	checkEdit
	vipJoins
	vipLeaves
	editKinds
)

var editNames = [editKinds]string{
	"policy", "target joins", "target leaves", "stream", "check", "VIP joins", "VIP leaves",
}

// The first streams are edited; flows go to the VIPs of the others.
const (
	targetStream = iota
	seedStream
	portStream
	vipStream
	editedStreams
)

// bigPod is a pod with many VIPs, streams and targets. The targets are addresses of one namespace,
// and a receiver is the gateway. The default route of the main table leads to a link without hosts.
type bigPod struct {
	*fixture
	size      podSize
	permanent int // VIPs that never leave
	receiver  *lab.Receiver
	vips      []string // of each stream, with commas
	allVIPs   string
	others    string // the streams that are not edited

	counts  [editKinds]atomic.Int64 // of edits, with the first visitors
	written atomic.Int64            // transactions of the other process
	left    map[netip.Prefix]time.Time
	mu      sync.Mutex
	effects [editKinds]map[int]bool // the edits that were seen in effect, from 1

	stalls       []time.Time // the ends of times in which this process did not run
	longestStall time.Duration
}

func newBigPod(t *testing.T, size podSize) *bigPod {
	t.Helper()
	lab.Need(t, "nft")
	l, err := lab.New(lab.QuickDAD)
	harness.Must(t, err)
	f := &bigPod{
		fixture: &fixture{t: t, Lab: l, pod: &lab.Pod{Lab: l, Binaries: binaries}},
		size:    size, permanent: size.vips - reserved, left: map[netip.Prefix]time.Time{},
		vips: make([]string, size.streams),
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
				if p != nil {
					t.Logf("== last lines of %s\n%s", p.Name, p.Tail(60))
				}
			}
		}
		harness.Check(t, l.Close())
	})
	f.receiver, err = lab.StartReceiver(l.Gateway, lab.ReceiverA())
	f.must(err)
	t.Cleanup(func() { harness.Check(t, f.receiver.Close()) })
	for i := range f.permanent {
		f.vips[i/2%size.streams] += fmt.Sprintf("%q, ", growth.VIP(i))
	}
	var others strings.Builder
	for n := editedStreams; n < size.streams; n++ {
		others.WriteString(f.stream(n, "", 0, checkPort, ""))
	}
	f.allVIPs, f.others = strings.Join(f.vips, ""), others.String()
	for kind := range f.effects {
		f.effects[kind] = map[int]bool{}
		f.counts[kind].Store(int64(f.initial(editKind(kind))))
	}
	f.wire()
	f.serve()
	f.must(f.pod.WriteTrench(f.trench()))
	return f
}

// wire gives the namespaces addresses and routes, and counts replies.
func (f *bigPod) wire() {
	f.t.Helper()
	const link = "02:76:67:05:00:01"
	backend := []string{
		"link set pod0 address " + link,
		"route add local 20.0.0.0/8 dev lo", "route add local 2000::/16 dev lo",
		"route add default via 172.16.0.1", "route add default via fd00:16::1",
	}
	pod := []string{
		"link add main0 type veth peer name main1", "link set main0 up", "link set main1 up",
		"route add 0.0.0.0/0 dev main0", "route add ::/0 dev main0",
	}
	for n := range f.size.targets + reserved {
		for _, a := range targetAddresses(n) {
			bits := map[bool]int{true: 16, false: 64}[a.Is4()]
			option := map[bool]string{true: "", false: " nodad"}[a.Is4()]
			backend = append(backend, fmt.Sprintf("addr add %s/%d dev pod0%s", a, bits, option))
			// The neighbor table of the machine has room for 1 024 entries that are not permanent.
			pod = append(pod, fmt.Sprintf("neigh replace %s lladdr %s dev %s nud permanent", a, link,
				lab.Internal))
		}
	}
	f.must(errors.Join(
		f.Backend.Sysctl("net.ipv4.conf.all.rp_filter", "0"),
		f.Backend.Sysctl("net.ipv4.conf.pod0.rp_filter", "0"),
		f.Pod.Sysctl("net.ipv4.conf.default.rp_filter", "0"),
		f.Pod.Sysctl("net.ipv4.conf."+lab.Internal+".rp_filter", "0"),
		f.Backend.Batch(backend...), f.Pod.Batch(pod...),
		f.Gateway.Batch(
			"addr add 198.51.100.1/32 dev lo", "addr add 2001:db8::1/128 dev lo nodad",
			"route add 20.0.0.0/8 via "+lab.PodExternal4.String()+" src 198.51.100.1",
			"route add 2000::/16 via "+lab.PodExternal6.String()+" src 2001:db8::1",
		),
	))
	f.podShell(`nft -f - <<'end'
table inet witness {
	counter main { }
	counter gateways { }
	chain out {
		type filter hook postrouting priority 300;
		ip saddr 20.0.0.0/8 oifname main0 counter name main
		ip6 saddr 2000::/16 oifname main0 counter name main
		ip saddr 20.0.0.0/8 oifname ` + lab.External + ` counter name gateways
		ip6 saddr 2000::/16 oifname ` + lab.External + ` counter name gateways
	}
}
end`)
}

// serve starts the application of all targets.
func (f *bigPod) serve() {
	f.t.Helper()
	server := load.NewServer("target")
	f.t.Cleanup(func() { harness.Check(f.t, server.Abort()) })
	listen := func(port int) net.Listener {
		listener, err := f.Backend.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		f.must(err)
		return listener
	}
	server.ServeRequests(listen(lab.RequestPort))
	server.ServeFlows(listen(lab.FlowPort))
	accept := func(port int, accepted func()) {
		listener := listen(port)
		var running sync.WaitGroup
		running.Go(func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				conn.Close()
				accepted()
			}
		})
		f.t.Cleanup(func() { listener.Close(); running.Wait() })
	}
	accept(checkPort, func() {})
	for n := range checkPorts {
		accept(firstCheckPort+n, func() {
			// The newest edit with this port.
			last := f.edited(checkEdit)
			if edit := last - (last-n+checkPorts)%checkPorts; edit > 0 {
				f.note(checkEdit, edit)
			}
		})
	}
}

// traffic is sent to permanent VIPs. It may be late, as on a starved machine.
func (f *bigPod) traffic() load.Config {
	c := load.Config{
		Rate: 50, Timeout: load.MaxTimeout, Flows: 40, Silence: load.MaxTimeout, Inside: f.Gateway.Do,
	}
	for i := range f.permanent {
		address := growth.VIP(i).Prefix().Addr()
		c.Requests = append(c.Requests, netip.AddrPortFrom(address, lab.RequestPort))
		if i/2%f.size.streams >= editedStreams {
			c.FlowsTo = append(c.FlowsTo, netip.AddrPortFrom(address, lab.FlowPort))
		}
	}
	return c
}

// policyVIP is the VIP whose policy is edited.
func policyVIP() netip.Prefix { return growth.VIP(0).Prefix() }

// visitor returns a VIP that joins and leaves.
func (f *bigPod) visitor(n int) netip.Prefix { return growth.VIP(f.permanent + n).Prefix() }

func targetAddresses(n int) []netip.Addr {
	return []netip.Addr{
		netip.AddrFrom4([4]byte{172, 16, byte(16 + n>>8), byte(n)}),
		netip.MustParseAddr(fmt.Sprintf("fd00:16::4:%x", n+1)),
	}
}

func targetLine(name string, n int) string {
	a := targetAddresses(n)
	return fmt.Sprintf("      - {name: %s, ips: [%s, %q]}\n", name, a[0], a[1])
}

// stream returns a stream of the trench file with further VIPs and targets.
func (f *bigPod) stream(n int, vips string, seed, port int, targets string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  - name: stream-%d\n    vips: [%s]\n    drainTime: 1s\n    maglev: {seed: %d}\n"+
		"    check: {tcp: {port: %d}, interval: 5s, timeout: 2s, rise: 1, fall: 10}\n    targets:\n%s", n,
		strings.TrimSuffix(f.vips[n]+vips, ", "), seed+1, port, targets)
	for target := n; target < f.size.targets; target += f.size.streams {
		b.WriteString(targetLine(fmt.Sprintf("target-%d", target), target))
	}
	return b.String()
}

// trench returns the trench file after the edits so far.
func (f *bigPod) trench() string {
	var vips, targets, b strings.Builder
	for n := f.edited(vipLeaves); n < f.edited(vipJoins); n++ {
		fmt.Fprintf(&vips, "%q, ", f.visitor(n).String())
	}
	for n := f.edited(targetLeaves); n < f.edited(targetJoins); n++ {
		targets.WriteString(targetLine(fmt.Sprintf("visitor-%d", n), f.size.targets+n%reserved))
	}
	fmt.Fprintf(&b, "trench: trench-a\nattractor:\n  name: attractor-a-1\n  gateways:\n    %s\n"+
		"    %s\n  policies: [{vips: [%s], ready: {med: %d}}]\n  vips: [%s]\nstreams:\n", lineA4, lineA6,
		policyVIP(), f.edited(policyEdit)+1,
		strings.TrimSuffix(f.allVIPs+vips.String(), ", "))
	b.WriteString(f.stream(targetStream, "", 0, checkPort, targets.String()))
	b.WriteString(f.stream(seedStream, "", f.edited(streamEdit), checkPort, ""))
	b.WriteString(f.stream(portStream, "", 0, firstCheckPort+f.edited(checkEdit)%checkPorts, ""))
	b.WriteString(f.stream(vipStream, vips.String(), 0, checkPort, ""))
	b.WriteString(f.others)
	return b.String()
}

// initial returns the number of edits of a kind that the first trench file contains.
func (f *bigPod) initial(kind editKind) int {
	if kind == targetJoins || kind == vipJoins {
		return visitors
	}
	return 0
}

func (f *bigPod) edited(kind editKind) int { return int(f.counts[kind].Load()) }

// edit makes the next edit: the kinds take turns.
func (f *bigPod) edit() error {
	kind := policyEdit
	for next := range editKinds {
		if f.edited(next)-f.initial(next) < f.edited(kind)-f.initial(kind) {
			kind = next
		}
	}
	if f.counts[kind].Add(1); kind == vipLeaves {
		f.left[f.visitor(f.edited(vipLeaves)-1)] = time.Now()
	}
	return f.pod.WriteTrench(f.trench())
}

// note notes that an edit was seen in effect.
func (f *bigPod) note(kind editKind, edit int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if edit > f.initial(kind) {
		f.effects[kind][edit] = true
	}
}

// seen returns how many edits of a kind were seen in effect.
func (f *bigPod) seen(kind editKind) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.effects[kind])
}

// noted reports whether an edit was seen in effect, or belongs to the first trench file.
func (f *bigPod) noted(kind editKind, edit int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return edit == f.initial(kind) || f.effects[kind][edit]
}

// observe notes each second which targets lb has, and which seed is in the kernel. It runs in the
// pod.
func (f *bigPod) observe(ctx context.Context) error {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return err
	}
	table := inetTable("vipgate-lb")
	chain := &nftables.Chain{Name: fmt.Sprintf("stream/stream-%d", seedStream), Table: table}
	return errors.Join(paced(ctx, time.Second, func() error {
		left, joined := f.edited(targetLeaves), f.edited(targetJoins)
		states, err := admin.TargetStates(ctx, f.pod)
		if err != nil && ctx.Err() == nil {
			return err
		}
		for n := range joined {
			switch state, has := states[fmt.Sprintf("visitor-%d", n)]; {
			case err == nil && !has && n < left:
				f.note(targetLeaves, n+1)
			case state == targetv1.State_STATE_READY:
				f.note(targetJoins, n+1)
			}
		}
		rules, err := conn.GetRules(table, chain)
		for _, rule := range rules {
			for _, e := range rule.Exprs {
				if hash, is := e.(*expr.Hash); is {
					f.note(streamEdit, int(hash.Seed)-1)
				}
			}
		}
		return err
	}), conn.CloseLasting())
}

// writeRuleset is another process that changes the ruleset of the pod. It runs in the pod.
func (f *bigPod) writeRuleset(ctx context.Context) error {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return err
	}
	table := conn.AddTable(inetTable("other"))
	set := &nftables.Set{Name: "ports", Table: table, KeyType: nftables.TypeInetService}
	elements := []nftables.SetElement{{Key: []byte{0, 80}}}
	if err := errors.Join(conn.AddSet(set, nil), conn.Flush()); err != nil {
		return err
	}
	return errors.Join(paced(ctx, time.Second/writeRate, func() error {
		change := conn.SetAddElements
		if f.written.Load()%2 == 1 {
			change = conn.SetDeleteElements
		}
		if err := errors.Join(change(set, elements), conn.Flush()); err != nil {
			return err
		}
		f.written.Add(1)
		return nil
	}), conn.CloseLasting())
}

// watchStalls notes for how long this process did not run, if that may end a lease.
func (f *bigPod) watchStalls(ctx context.Context) error {
	const interval = 20 * time.Millisecond
	last := time.Now()
	return paced(ctx, interval, func() error {
		now := time.Now()
		f.longestStall = max(f.longestStall, now.Sub(last)-interval)
		if now.After(last.Add(interval + f.size.lease/3)) { // a heartbeat
			f.stalls = append(f.stalls, now)
		}
		last = now
		return nil
	})
}

// paced repeats a task until ctx ends or it fails, also for the intervals of a stall.
func paced(ctx context.Context, interval time.Duration, task func() error) error {
	for next := time.Now(); ; next = next.Add(interval) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(next)):
			if err := task(); err != nil {
				return err
			}
		}
	}
}

// counter returns the packets of a counter of replies. The program nft would read all tables.
func (f *bigPod) counter(name string) (packets uint64) {
	f.t.Helper()
	f.must(f.Pod.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		object, err := conn.GetObject(&nftables.CounterObj{Table: inetTable("witness"), Name: name})
		if err == nil {
			packets = object.(*nftables.CounterObj).Packets
		}
		return err
	}))
	return packets
}

// removeMarks removes the rules that give replies the mark of the gateways' table.
func (f *bigPod) removeMarks() error {
	return f.Pod.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		conn.FlushChain(&nftables.Chain{Name: "prerouting", Table: inetTable("vipgate")})
		return conn.Flush()
	})
}

func inetTable(name string) *nftables.Table {
	return &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
}
