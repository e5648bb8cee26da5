package fwstate

import (
	"errors"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

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

	var reports *netlink.Conn
	must(t, ns.Do(func() (err error) {
		reports, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	}))
	t.Cleanup(func() { must(t, reports.Close()) })
	must(t, errors.Join(reports.SetReadBuffer(256<<20), reports.JoinGroup(unix.NFNLGRP_NFTABLES)))

	failed := exampleSlots("web", 5003)
	failed[0].Flows = [len(vip.Families)]bool{}
	after := plan.Change{
		Targets: append(exampleSlots("web", 5002), failed...), RemoveTargets: []uint32{5000},
		Streams: []plan.StreamWrite{{Desired: plan.KernelStream{
			Name: "web", Size: size, Seed: 7,
			Tables: bothFamilies(filled(size, 5002, 5001, 5001)),
		}, Observed: now}},
	}
	transactions := f.Transactions()
	must(t, f.Write(after))
	if n := f.Transactions() - transactions; n < 3 {
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
	ended := 0
	handle := func(m netlink.Message) {
		kind, b := uint16(m.Header.Type)&0xff, nlmsg.Netfilter(m.Data)
		switch kind {
		case unix.NFT_MSG_NEWGEN:
			at++
			ended++
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
	}
	for ended < int(f.Transactions()-transactions) {
		msgs, err := reports.Receive()
		must(t, err)
		for _, m := range msgs {
			handle(m)
		}
	}
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
