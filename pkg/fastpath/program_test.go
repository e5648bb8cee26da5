package fastpath

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// fixture is a program in a namespace with the interfaces eth0 and port0, a port of a bridge.
type fixture struct {
	*Program
	t     *testing.T
	ns    *lab.NetNS
	links []plan.Link
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	ns := lab.NewNetNS(t)
	if err := ns.Do(Probe); err != nil {
		lab.Skip(t, err.Error())
	}
	ns.Shell(t, "ip link add eth0 type veth peer name port0; ip link add br0 type bridge; ip link set port0 master br0")
	index := map[string]int{}
	harness.Must(t, ns.Do(func() error {
		interfaces, err := net.Interfaces()
		for _, each := range interfaces {
			index[each.Name] = each.Index
		}
		return err
	}))
	f := &fixture{Program: New(), t: t, ns: ns, links: []plan.Link{
		{Name: "lo", Index: 1, Loopback: true},
		{Name: "eth0", Index: index["eth0"], Ethernet: true},
		{Name: "port0", Index: index["port0"], Ethernet: true, Port: true},
		{Name: "tun0", Index: 99},
	}}
	t.Cleanup(func() { harness.Must(t, f.Detach()) })
	return f
}

func (f *fixture) apply(content Content) []Interface {
	f.t.Helper()
	var list []Interface
	harness.Must(f.t, f.ns.Do(func() (err error) { list, err = f.Apply(content, f.links); return err }))
	harness.Must(f.t, f.Verify())
	return list
}

// contentOf has streams of 7 entries whose targets have hops on a link.
func contentOf(link, streams int) Content {
	content := Content{Hops: map[Target]Hop{}}
	for i := range streams {
		fwmark := uint32(5000 + i)
		stream := &plan.KernelStream{
			Name: fmt.Sprintf("stream-%d", i), Size: 7, Seed: 1, Match: []plan.Port{{Protocol: plan.TCP, Number: 80}},
		}
		for _, family := range vip.Families {
			stream.Tables[family] = slices.Repeat([]uint32{fwmark}, 7)
		}
		content.Hops[Target{fwmark, vip.IPv4}] = Hop{netip.AddrFrom4([4]byte{172, 16, 0, byte(i)}), link, 1500}
		content.Streams = append(content.Streams, Stream{KernelStream: stream, VIPs: []vip.VIP{
			vip.Require(fmt.Sprintf("20.0.0.%d/32", i)), vip.Require(fmt.Sprintf("2000::%d/128", i)), vip.Require("20.1.0.0/16"),
		}})
	}
	return content
}

func TestInterfaces(t *testing.T) {
	f := newFixture(t)
	list := f.apply(contentOf(f.links[1].Index, 1))
	if len(list) != 3 || list[0] != (Interface{Name: "eth0"}) || list[1].Reason == "" || list[2].Reason == "" {
		t.Errorf("interfaces: %v", list)
	}
	// A link that the system lost is closed.
	f.links = f.links[:1]
	f.apply(contentOf(1, 1))
	if f.Attached() {
		t.Error("the program is attached to an interface that left")
	}
}

// A content that fits is written in place, a larger one into larger maps.
func TestGrowth(t *testing.T) {
	f := newFixture(t)
	at := f.links[1].Index
	f.apply(contentOf(at, 2))
	first := f.current
	f.apply(contentOf(at, 1))
	f.apply(contentOf(at, 3))
	if f.current != first {
		t.Error("a content that fits was written into another instance")
	}
	counted := slices.Repeat([]Counter{{3, 300}}, ebpf.MustPossibleCPU())
	harness.Must(t, first.Counters.Put(uint32(1), counted))
	f.apply(contentOf(at, 200))
	if f.current == first || !f.Attached() {
		t.Error("a content that does not fit was not written into another instance, or is not attached")
	}
	want := Counter{3 * uint64(len(counted)), 300 * uint64(len(counted))}
	if got, err := f.Counters(); err != nil || got[5000] != want {
		t.Errorf("the counters of the replaced instance are %v, %v; want %v", got, err, want)
	}
	// The next target with the same fwmark starts at 0.
	harness.Must(t, f.current.Counters.Put(uint32(1), counted))
	harness.Must(t, f.Forget([]uint32{f.current.owners[1].FWMark, 5000}))
	if got, err := f.Counters(); err != nil || got[f.current.owners[1].FWMark] != (Counter{}) || got[5000] != (Counter{}) {
		t.Errorf("the counters of forgotten targets are %v, %v", got, err)
	}
	harness.Must(t, f.Detach())
	if got, err := f.Counters(); err != nil || got[5000] != (Counter{}) {
		t.Errorf("the counters of forgotten targets without an instance are %v, %v", got, err)
	}
}

// Another seed or size, ports, hops and VIPs end in the same maps as a new program.
func TestChangesInPlace(t *testing.T) {
	f := newFixture(t)
	at := f.links[1].Index
	f.apply(contentOf(at, 3))
	changed := contentOf(at, 3)
	changed.Streams[0].Seed, changed.Streams[1].Match = 2, nil
	changed.Streams[2].VIPs = changed.Streams[0].VIPs
	changed.Streams = changed.Streams[1:]
	changed.Hops[Target{5001, vip.IPv4}] = Hop{netip.MustParseAddr("172.16.0.99"), at, 1400}
	f.apply(changed)
	records := map[string]record{}
	for key, index := range f.current.recordOf {
		records[key.stream+key.family.String()] = f.current.records[index]
	}
	if r := records["stream-0"+vip.IPv4.String()]; r.Size != 0 {
		t.Errorf("the record of a removed stream is active: %v", r)
	}
	if r := records["stream-1"+vip.IPv4.String()]; r.Size != 7 || r.Match != 0 {
		t.Errorf("the record of a stream without a match: %v", r)
	}
	var index uint32
	harness.Must(t, f.current.Vips4.Lookup([4]byte{20, 0, 0, 0}, &index))
	if f.current.records[index] != records["stream-2"+vip.IPv4.String()] {
		t.Error("a VIP does not lead to its new stream")
	}
}

func TestForeignChangesDetach(t *testing.T) {
	for name, change := range map[string]func(f *fixture) error{
		"table": func(f *fixture) error { return f.current.Tables.Put(uint32(3), uint32(0)) },
		"hop":   func(f *fixture) error { return f.current.Hops.Put(uint32(1), hop{}) },
		"port":  func(f *fixture) error { return f.current.Ports.Put(port{Number: [2]byte{1}}, uint8(0)) },
		"VIP":   func(f *fixture) error { return f.current.Vips6.Put([16]byte{1}, uint32(0)) },
		// The kernel detaches the link and keeps its file descriptor.
		"link": func(f *fixture) error { f.ns.Shell(f.t, "ip link del eth0"); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.apply(contentOf(f.links[1].Index, 1))
			harness.Must(t, change(f))
			if err := f.Verify(); err == nil || !strings.Contains(err.Error(), "another process") {
				t.Errorf("the change was not detected: %v", err)
			}
			if f.Attached() {
				t.Error("the program is still attached")
			}
		})
	}
}
