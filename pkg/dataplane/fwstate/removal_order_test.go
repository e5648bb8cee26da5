package fwstate

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// A change of more elements than fit one transaction takes several. A target is removed
// after the last entry that leads to it, and added before the first one.
func TestRemovalOrderInLargeChanges(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	const size = 10007
	before := plan.Change{Base: true, Targets: exampleSlots("web", 5000, 5001), Streams: []plan.StreamWrite{{Desired: plan.KernelStream{Name: "web", Size: size, Seed: 7, Tables: bothFamilies(filled(size, 5000, 5001))}}}}
	must(t, writeBase(f, before))
	now, err := f.ReadStream("web")
	must(t, err)

	var reports *nlmsg.Socket
	must(t, ns.Do(func() (err error) {
		reports, err = nlmsg.Open(unix.NETLINK_NETFILTER)
		return err
	}))
	t.Cleanup(func() { must(t, reports.Close()) })
	must(t, errors.Join(reports.SetReceiveBuffer(256<<20), reports.Join(unix.NFNLGRP_NFTABLES)))

	after := plan.Change{Targets: exampleSlots("web", 5002), RemoveTargets: []uint32{5000}, Streams: []plan.StreamWrite{{Desired: plan.KernelStream{Name: "web", Size: size, Seed: 7, Tables: bothFamilies(filled(size, 5002, 5001))}, Observed: now}}}
	transactions := f.Transactions()
	must(t, f.Write(after))
	if n := f.Transactions() - transactions; n < 3 {
		t.Fatalf("%d transactions: the change is not a large one", n)
	}

	// Which target each element leads to, and when what was reported, by transaction.
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
	must(t, reports.Receive(func(h unix.NlMsghdr, data []byte) (bool, error) {
		kind := h.Type & 0xff
		if h.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(data) < nlmsg.NFHeaderLen {
			return false, nil
		}
		b := data[nlmsg.NFHeaderLen:]
		switch kind {
		case unix.NFT_MSG_NEWGEN:
			at++
			ended++
			return ended == int(f.Transactions()-transactions), nil
		case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
			if n, ok := plan.ParseTargetChain(nlmsg.Text(nlmsg.Attribute(b, unix.NFTA_CHAIN_NAME))); ok {
				note(happened{chain, n, kind == unix.NFT_MSG_NEWCHAIN})
			}
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			set, added := nlmsg.Text(nlmsg.Attribute(b, unix.NFTA_SET_ELEM_LIST_SET)), kind == unix.NFT_MSG_NEWSETELEM
			for _, e := range nlmsg.Attributes(nlmsg.Attribute(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				key := nlmsg.Uint32(nlmsg.Attribute(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_KEY), unix.NFTA_DATA_VALUE))
				data := nlmsg.Attribute(nlmsg.Attribute(e, unix.NFTA_SET_ELEM_DATA), unix.NFTA_DATA_VALUE)
				switch set {
				case plan.LiveMap(vip.IPv4, "web"), plan.LiveMap(vip.IPv6, "web"):
					note(happened{live, key, added})
				case plan.MaglevMap(vip.IPv4, "web"), plan.MaglevMap(vip.IPv6, "web"):
					if len(data) == 4 {
						note(happened{entry, binary.NativeEndian.Uint32(data), added})
					}
				}
			}
		}
		return false, nil
	}))
	for _, h := range []happened{{entry, 5000, false}, {entry, 5002, true}, {live, 5000, false}, {live, 5002, true}, {chain, 5000, false}, {chain, 5002, true}} {
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
	if last[happened{live, 5002, true}] > first[happened{entry, 5002, true}] || last[happened{chain, 5002, true}] > first[happened{entry, 5002, true}] {
		t.Error("an entry leads to a target before its flows live")
	}
	got := readAll(t, f)
	if s := got.Targets[5000]; s != nil && s.ChainIntact || slices.Contains(got.Streams["web"].Tables[vip.IPv4], 5000) {
		t.Error("the target is still installed")
	}
}
