package midstream

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// streams returns two streams of both families: one in which two of seven slots have earlier targets,
// and one of which all targets are asked.
func streams() (all Streams) {
	link, addresses := plan.LinkAddress{2, 0, 0, 0, 0, 1}, []string{"172.16.1.1", "fd00:16::1"}
	for _, family := range vip.Families {
		address := netip.MustParseAddr(addresses[family])
		all[family] = []Stream{{
			Name: "stream-a", Size: 7, Seed: 1, FWMarks: map[uint32]plan.LinkAddress{5000: link, 5001: {}},
			Asked: [copies]map[uint32]netip.Addr{{3: address, 5: address}, {5: address.Next()}},
		}, {
			Name: "stream-z", FWMarks: map[uint32]plan.LinkAddress{5002: {2, 0, 0, 0, 0, 2}, 5003: {2, 0, 0, 0, 0, 3}, 5004: {}},
			Everyone: map[uint32]netip.Addr{5002: address, 5003: address.Next(), 5004: address.Next().Next()},
		}}
	}
	return all
}

// Apply installs both tables, repairs a change of another process, and removes them.
func TestApply(t *testing.T) {
	ns := lab.NewNetNS(t)
	var conn *nft.Conn
	harness.Must(t, ns.Do(func() (err error) {
		conn, err = nft.Dial()
		return err
	}))
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	apply := func(want string, streams Streams) {
		t.Helper()
		difference, err := Apply(conn, Mode{Mask: 0xffffff}, streams, nil)
		if err != nil || difference != want {
			t.Fatalf("Apply returned %q, %v; want %q", difference, err, want)
		}
	}
	apply("table ip vipgate-lb", streams())
	apply("", streams())
	// nft must be able to list the rules that it did not write.
	for _, family := range []string{"ip", "ip6"} {
		out, err := ns.Run(t.Context(), "nft", "list", "table", family, "vipgate-lb")
		if err != nil || !strings.Contains(out, "dup to") {
			t.Fatalf("%v:\n%s", err, out)
		}
		t.Log(out)
	}
	for change, difference := range map[string]string{
		"flush chain ip vipgate-lb denied":                           "rules of chain ip vipgate-lb denied",
		"delete element ip vipgate-lb asked-1/stream-a { 3 }":        "elements of map ip vipgate-lb asked-1/stream-a",
		"delete element ip6 vipgate-lb link/stream-a { 2:0:0:0:0:1}": "elements of set ip6 vipgate-lb link/stream-a",
		"delete table ip6 vipgate-lb":                                "table ip6 vipgate-lb",
	} {
		ns.Shell(t, "nft '"+change+"'")
		apply(difference, streams())
		apply("", streams())
	}
	// A change of the streams replaces their objects, and leaves undecided flows alone.
	ns.Shell(t, "nft add element ip vipgate-lb undecided '{ 1.2.3.4 . 20.0.0.1 . 1000 . 5000 }'")
	changed := streams()
	changed[vip.IPv4][0].Name = "stream-b"
	apply("chain ip vipgate-lb stream/stream-b", changed)
	if out := ns.Shell(t, "nft list set ip vipgate-lb undecided"); !strings.Contains(out, "1.2.3.4") {
		t.Error(out)
	}
	if counters, err := Read(conn); err != nil || counters != (Counters{}) {
		t.Errorf("%+v, %v", counters, err)
	}
	apply("table without streams", Streams{})
	if out := ns.Shell(t, "nft list ruleset"); out != "" {
		t.Error(out)
	}
}

// A change of known content writes only differences, and leads to the same tables.
func TestApplyDifferences(t *testing.T) {
	ns := lab.NewNetNS(t)
	var conn *nft.Conn
	harness.Must(t, ns.Do(func() (err error) {
		conn, err = nft.Dial()
		return err
	}))
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	random := rand.New(rand.NewPCG(1, 0))
	known := Streams{}
	for step := range 60 {
		next := Streams{}
		for _, family := range vip.Families {
			if random.IntN(6) == 0 {
				continue // the table goes
			}
			for number := range 4 {
				if random.IntN(8) == 0 {
					continue
				}
				next[family] = append(next[family], randomStream(random, family, uint32(number)))
			}
		}
		if _, err := Apply(conn, Mode{Mask: 0xffffff}, next, &known); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if difference, err := Apply(conn, Mode{Mask: 0xffffff}, next, nil); difference != "" || err != nil {
			t.Fatalf("step %d: %q, %v\nbefore %+v\nafter %+v", step, difference, err, known, next)
		}
		known = next
	}
}

// Streams with equal IDs come and go without an error, and lead to the same tables.
func TestApplyEqualIDs(t *testing.T) {
	ns := lab.NewNetNS(t)
	var conn *nft.Conn
	harness.Must(t, ns.Do(func() (err error) {
		conn, err = nft.Dial()
		return err
	}))
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	one, other := streams()[vip.IPv4][1], streams()[vip.IPv4][1]
	one.Name, other.Name = "costarring", "liquid"
	if one.id() != other.id() {
		t.Fatalf("IDs %x and %x", one.id(), other.id())
	}
	// Fwmarks belong to one stream.
	other.FWMarks, other.Everyone = map[uint32]plan.LinkAddress{}, map[uint32]netip.Addr{}
	for fwmark, address := range one.Everyone {
		other.FWMarks[fwmark+100], other.Everyone[fwmark+100] = one.FWMarks[fwmark], address
	}
	known := Streams{}
	for step, list := range [][]Stream{{one}, {one, other}, {other}, {one, other}, {one}, {other}} {
		next := Streams{vip.IPv4: list}
		if _, err := Apply(conn, Mode{Mask: 0xffffff}, next, &known); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if difference, err := Apply(conn, Mode{Mask: 0xffffff}, next, nil); difference != "" || err != nil {
			t.Fatalf("step %d: %q, %v", step, difference, err)
		}
		known = next
	}
}

// A stream with too many targets does not take the room of others.
func TestLimitedStreams(t *testing.T) {
	for _, tt := range []struct{ targets, want []int }{
		{[]int{maxTargets - 1, 1}, []int{maxTargets - 1, 1}},
		{[]int{maxTargets - 1, 2, 1}, []int{maxTargets - 1, 1}},
		{[]int{maxTargets, 1}, []int{maxTargets}},
		{[]int{maxTargets + 1, maxTargets}, []int{maxTargets}},
	} {
		var list []Stream
		for _, targets := range tt.targets {
			stream := Stream{FWMarks: map[uint32]plan.LinkAddress{}}
			for fwmark := range uint32(targets) {
				stream.FWMarks[fwmark] = plan.LinkAddress{}
			}
			list = append(list, stream)
		}
		var got []int
		for _, stream := range limited(list) {
			got = append(got, len(stream.FWMarks))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("of %v: got %v, want %v", tt.targets, got, tt.want)
		}
	}
}

// randomStream returns a stream that asks earlier targets or all of them. Streams share link-layer
// addresses.
func randomStream(random *rand.Rand, family vip.Family, number uint32) Stream {
	address := func() netip.Addr {
		if family == vip.IPv4 {
			return netip.AddrFrom4([4]byte{172, 16, 0, byte(random.IntN(6))})
		}
		return netip.AddrFrom16([16]byte{0xfd, 15: byte(random.IntN(6))})
	}
	stream := Stream{
		Name: fmt.Sprint("stream-", number), Size: 7 + 4*uint32(random.IntN(8)/7), Seed: 1 + uint32(random.IntN(8)/7),
		SCTP: random.IntN(2) == 0, FWMarks: map[uint32]plan.LinkAddress{},
		Asked: [copies]map[uint32]netip.Addr{{}, {}},
	}
	everyone := map[uint32]netip.Addr{}
	for target := range uint32(4) {
		if random.IntN(3) > 0 {
			fwmark := 5000 + 4*number + target
			stream.FWMarks[fwmark], everyone[fwmark] = plan.LinkAddress{5: byte(random.IntN(5))}, address()
		}
	}
	if random.IntN(2) == 0 && len(everyone) > 0 {
		stream.Everyone, stream.Asked = everyone, [copies]map[uint32]netip.Addr{}
		return stream
	}
	for slot := range stream.Size {
		if random.IntN(2) == 0 {
			stream.Asked[0][slot] = address()
		}
	}
	return stream
}
