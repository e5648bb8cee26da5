package fwstate

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// transactionsOf records the transactions from now on. Each calls note for their messages.
func transactionsOf(t *testing.T, ns *lab.NetNS, f *Conn) (
	each func(note func(transaction int, kind uint16, b nlmsg.Attributes)),
) {
	t.Helper()
	var reports *netlink.Conn
	must(t, ns.Do(func() (err error) {
		reports, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	}))
	t.Cleanup(func() { must(t, reports.Close()) })
	must(t, errors.Join(reports.SetReadBuffer(256<<20), reports.JoinGroup(unix.NFNLGRP_NFTABLES)))
	before := f.Transactions()
	return func(note func(int, uint16, nlmsg.Attributes)) {
		for ended := 0; ended < int(f.Transactions()-before); {
			msgs, err := reports.Receive()
			must(t, err)
			for _, m := range msgs {
				kind := uint16(m.Header.Type) & 0xff
				if kind == unix.NFT_MSG_NEWGEN {
					ended++
				}
				note(ended, kind, nlmsg.Netfilter(m.Data))
			}
		}
	}
}

// A change with more than MaxElements takes several transactions. A target is removed after
// the last entry that references it, and added before the first one. A failed target gets no packet
// after the first transaction.
func TestRemovalOrderInLargeChanges(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	const size = 10007
	before := plan.Change{
		Base: true, Targets: exampleSlots("web", 5000, 5001, 5003),
		Streams: []plan.StreamWrite{{Desired: plan.KernelStream{
			Name: "web", Size: size, Seed: 7,
			Tables: bothFamilies(filled(size, 5000, 5001, 5003)),
		}}},
	}
	must(t, writeBase(f, before))
	now, err := f.ReadStream("web")
	must(t, err)

	each := transactionsOf(t, ns, f)
	failed := exampleSlots("web", 5003)
	failed[0].Flows = [len(vip.Families)]bool{}
	after := plan.Change{
		Targets: append(exampleSlots("web", 5002), failed...), RemoveTargets: []uint32{5000},
		Streams: []plan.StreamWrite{{Desired: plan.KernelStream{
			Name: "web", Size: size, Seed: 7,
			Tables: bothFamilies(filled(size, 5002, 5001, 5001)),
		}, Observed: now}},
	}
	written := f.Transactions()
	must(t, f.Write(after))
	if n := f.Transactions() - written; n < 3 {
		t.Fatalf("%d transactions: the change is not a large one", n)
	}

	// Record the target of each element and the transaction of each notification.
	const (
		entry = "entry of a table"
		live  = "live element"
		chain = "chain"
	)
	type happened struct {
		what   string
		number uint32
		added  bool
	}
	first, last := map[happened]int{}, map[happened]int{}
	at := 0
	note := func(h happened) {
		if _, known := first[h]; !known {
			first[h] = at
		}
		last[h] = at
	}
	each(func(transaction int, kind uint16, b nlmsg.Attributes) {
		at = transaction
		switch kind {
		case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
			if n, ok := plan.ParseTargetChain(b.Text(unix.NFTA_CHAIN_NAME)); ok {
				note(happened{chain, n, kind == unix.NFT_MSG_NEWCHAIN})
			}
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			set, added := b.Text(unix.NFTA_SET_ELEM_LIST_SET), kind == unix.NFT_MSG_NEWSETELEM
			for _, e := range b.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
				switch set {
				case plan.LiveMap(vip.IPv4, "web"), plan.LiveMap(vip.IPv6, "web"):
					note(happened{live, e.Uint32(unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE), added})
				case plan.MaglevMap(vip.IPv4, "web"), plan.MaglevMap(vip.IPv6, "web"):
					if fwmark := e.Uint32(unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE); fwmark != 0 {
						note(happened{entry, fwmark, added})
					}
				}
			}
		}
	})
	for _, h := range []happened{
		{entry, 5000, false},
		{entry, 5002, true},
		{live, 5000, false},
		{live, 5002, true},
		{chain, 5000, false},
		{chain, 5002, true},
		{entry, 5003, false},
		{live, 5003, false},
	} {
		if _, ok := first[h]; !ok {
			t.Fatalf("not reported: %+v; reported %v", h, first)
		}
	}
	if last[happened{entry, 5000, false}] > first[happened{live, 5000, false}] {
		t.Error("a target's flows end while entries lead to it")
	}
	if last[happened{entry, 5000, false}] > first[happened{chain, 5000, false}] {
		t.Error("a target's chain is removed while entries lead to it")
	}
	if last[happened{live, 5002, true}] > first[happened{entry, 5002, true}] ||
		last[happened{chain, 5002, true}] > first[happened{entry, 5002, true}] {
		t.Error("an entry leads to a target before its flows live")
	}
	if last[happened{live, 5003, false}] > 0 {
		t.Error("a failed target gets packets after the first transaction")
	}
	got := readAll(t, f)
	if s := got.Targets[5000]; s != nil && s.ChainIntact || slices.Contains(got.Streams["web"].Tables[vip.IPv4], 5000) {
		t.Error("the target is still installed")
	}
}

// VIPs that move to a renamed stream take several transactions. The targets of the stream keep the
// flows of VIPs that have not moved yet.
func TestVIPsMoveInParts(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	f.nft.SendLimit = 16 << 10
	named := func(stream string) plan.Change {
		change := plan.Change{
			Base: true, Targets: exampleSlots(stream, 5000, 5001), VIPs: map[vip.VIP]string{},
			Streams: []plan.StreamWrite{{Desired: plan.KernelStream{
				Name: stream, Size: 101, Seed: 7, Tables: bothFamilies(filled(101, 5000, 5001)),
			}}},
		}
		for n := range 200 {
			change.VIPs[vip.Require(netip.AddrFrom4([4]byte{30, 0, 0, byte(n)}).String()+"/32")] = stream
		}
		return change
	}
	must(t, writeBase(f, named("old")))
	each := transactionsOf(t, ns, f)
	change := named("new")
	change.RemoveStreams = []string{"old"}
	must(t, f.Write(change))
	moves, leave := map[int]bool{}, -1
	each(func(transaction int, kind uint16, b nlmsg.Attributes) {
		switch set := b.Text(unix.NFTA_SET_ELEM_LIST_SET); {
		case kind == unix.NFT_MSG_NEWSETELEM && set == plan.HostMaps[vip.IPv4]:
			moves[transaction] = true
		case kind == unix.NFT_MSG_DELSETELEM && set == plan.LiveMap(vip.IPv4, "old") && leave < 0:
			leave = transaction
		}
	})
	if last := slices.Max(slices.Collect(maps.Keys(moves))); len(moves) < 2 || leave < last {
		t.Errorf("VIPs move in transactions %v, targets leave in %d", moves, leave)
	}
}

// The stream, its targets and VIPs fit the send buffer of a pod in a user namespace, whatever fills
// the halves of the buffer.
func TestStreamInSmallBuffer(t *testing.T) {
	for _, tt := range []struct {
		targets, vips int
		sizes         [3]uint32 // of both streams, and of the second later
	}{{150, 900, [...]uint32{1009, 13, 17}}, {2600, 900, [...]uint32{2003, 1511, 2999}}} {
		f := openConn(t, lab.NewNetNS(t), Config{})
		f.nft.SendLimit = 212_992
		var fwmarks []uint32
		for n := range uint32(tt.targets) {
			fwmarks = append(fwmarks, DefaultFirst+n)
		}
		stream := func(name string, size uint32, observed *plan.KernelStream) plan.StreamWrite {
			return plan.StreamWrite{Observed: observed, Desired: plan.KernelStream{
				Name: name, Size: size, Seed: 7, Tables: bothFamilies(filled(size, fwmarks...)),
			}}
		}
		change := plan.Change{
			Base: true, Targets: exampleSlots("web", fwmarks...), VIPs: map[vip.VIP]string{},
			Streams: []plan.StreamWrite{stream("web", tt.sizes[0], nil)},
		}
		for n := range tt.vips {
			change.VIPs[vip.Require(netip.AddrFrom4([4]byte{30, 0, byte(n >> 8), byte(n)}).String()+"/32")] = "web"
		}
		must(t, writeBase(f, change))
		web := mustHave(t, f, change.Streams[0].Desired)
		other := stream("other", tt.sizes[1], nil)
		must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{other}}))
		change = plan.Change{Streams: []plan.StreamWrite{
			stream("web", tt.sizes[1], web), stream("other", tt.sizes[2], mustHave(t, f, other.Desired)),
		}}
		must(t, f.Write(change))
		mustHave(t, f, change.Streams[0].Desired)
		mustHave(t, f, change.Streams[1].Desired)
		gone := plan.Change{RemoveStreams: []string{"web", "other"}, RemoveTargets: fwmarks, VIPs: map[vip.VIP]string{}}
		state := readAll(t, f)
		for v := range state.VIPs {
			gone.VIPs[v] = ""
		}
		must(t, f.Write(gone))
		if left := readAll(t, f); len(state.VIPs) != tt.vips || len(left.Targets)+len(left.Streams)+len(left.VIPs) > 0 {
			t.Errorf("%d VIPs, then %+v", len(state.VIPs), left)
		}
	}
}

// Many new streams do not fail together, to be written one by one.
func TestManyStreamsInSmallBuffer(t *testing.T) {
	f := openConn(t, lab.NewNetNS(t), Config{})
	f.nft.SendLimit = 212_992
	change := plan.Change{Base: true, Targets: exampleSlots("stream0", 5000, 5001)}
	for n := range 300 {
		change.Streams = append(change.Streams, plan.StreamWrite{Desired: plan.KernelStream{
			Name: fmt.Sprint("stream", n), Size: 13, Seed: 7, Tables: bothFamilies(filled(13, 5000, 5001)), Match: exampleMatch,
		}})
	}
	must(t, f.Write(change))
	for _, write := range change.Streams {
		mustHave(t, f, write.Desired)
	}
	gone := plan.Change{}
	for _, write := range change.Streams {
		gone.RemoveStreams = append(gone.RemoveStreams, write.Desired.Name)
	}
	must(t, f.Write(gone))
	if left := readAll(t, f); len(left.Streams) > 0 {
		t.Errorf("%d streams are left", len(left.Streams))
	}
}
