package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// transactions records the notifications of nftables about the sets, by transaction.
type transactions struct {
	ns   *lab.NetNS
	conn *netlink.Conn
}

// record subscribes to notifications about later changes.
func record(t *testing.T, ns *lab.NetNS) *transactions {
	t.Helper()
	x := &transactions{ns: ns}
	must(t, ns.Do(func() (err error) {
		x.conn, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	}))
	t.Cleanup(func() { must(t, x.conn.Close()) })
	must(t, x.conn.SetReadBuffer(8<<20))
	must(t, x.conn.JoinGroup(unix.NFNLGRP_NFTABLES))
	return x
}

// uncovered replays the transactions on the initial content of the sets. It returns the VIPs that
// were in no set, with the transaction.
func (x *transactions) uncovered(t *testing.T, begin, want []vip.VIP) []string {
	t.Helper()
	const end = "the-end"
	x.ns.Shell(t, "nft add table inet "+end)
	must(t, x.conn.SetReadDeadline(time.Now().Add(patience)))
	type key struct {
		at  string
		end bool
	}
	sets := map[string]map[key]nft.Element{}
	put := func(set string, e nft.Element) {
		if sets[set] == nil {
			sets[set] = map[key]nft.Element{}
		}
		sets[set][key{string(e.Key), e.End}] = e
	}
	for _, f := range vip.Families {
		for _, e := range elements(disjoint(vip.NewSet(begin...), f)) {
			put([]string{"vip4", "vip6"}[f], e)
		}
	}
	var missing []string
	for transaction := 1; ; {
		msgs, err := x.conn.Receive()
		must(t, err)
		for _, m := range msgs {
			kind, message := m.Header.Type&0xff, nlmsg.Netfilter(m.Data)
			if kind == unix.NFT_MSG_NEWGEN {
				for _, v := range want {
					var all []nft.Element
					for _, e := range sets[[]string{"vip4", "vip6"}[v.Family()]] {
						all = append(all, e)
					}
					if !covered(nft.Ranges(all), nft.RangeOf(v.Prefix())) {
						missing = append(missing, fmt.Sprintf("%s after transaction %d", v, transaction))
					}
				}
				transaction++
				continue
			}
			// All messages have the name of the table in attribute 1, those about sets its name in 2.
			table, set := message.Text(unix.NFTA_TABLE_NAME), message.Text(unix.NFTA_SET_NAME)
			var elems []nft.Element
			if kind == unix.NFT_MSG_NEWSETELEM || kind == unix.NFT_MSG_DELSETELEM {
				for _, e := range message.Get(unix.NFTA_SET_ELEM_LIST_ELEMENTS).All() {
					elems = append(elems, nft.Element{
						Key: slices.Clone(e.Get(unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)),
						End: e.Uint32(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0,
					})
				}
			}
			switch {
			case kind == unix.NFT_MSG_NEWTABLE && table == end:
				x.ns.Shell(t, "nft delete table inet "+end)
				return missing
			case table != TableName:
			case kind == unix.NFT_MSG_DELTABLE:
				clear(sets)
			case kind == unix.NFT_MSG_DELSET:
				delete(sets, set)
			case kind == unix.NFT_MSG_NEWSETELEM:
				for _, e := range elems {
					put(set, e)
				}
			case kind == unix.NFT_MSG_DELSETELEM:
				for _, e := range elems {
					delete(sets[set], key{string(e.Key), e.End})
				}
			}
		}
	}
}

// A repair never empties a set in between, since packets from a VIP in no set leave by the
// default route.
func TestRepairNeverEmptiesASet(t *testing.T) {
	list := vips("20.0.0.1/32", "20.0.0.2/32", "20.1.0.0/24", "2000::1/128")
	for _, tt := range []struct{ name, damage string }{
		{"rules of a chain", "nft flush chain inet vipgate prerouting"},
		{"foreign rule", "nft insert rule inet vipgate output accept"},
		{"chain", "nft 'flush chain inet vipgate output; delete chain inet vipgate output'"},
		{"policy", "nft 'chain inet vipgate prerouting { policy drop; }'"},
		{"dormant table", "nft 'add table inet vipgate { flags dormant; }'"},
		{"foreign elements", "nft add element inet vipgate vip4 { 30.0.0.0/8, 20.0.0.3 }"},
		{
			"chain of another kind",
			"nft 'delete chain inet vipgate output; add chain inet vipgate output { type filter hook output priority 0; }'",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			r := startQuiet(t, ns, testOptions(t), list)
			before := normalized(t, ns)
			x := record(t, ns)
			ns.Shell(t, tt.damage)
			r.waitFor(t, "a repair", func(c Confirmed) bool { return c.Repairs > 0 })
			await.True(t, "everything as before", func() bool { return normalized(t, ns) == before })
			r.waitConfirmed(t, list...)
			if missing := x.uncovered(t, list, list); len(missing) > 0 {
				t.Errorf("not in a set: %v", missing)
			}
		})
	}
}

// look runs one reconciliation in the namespace.
func look(t *testing.T, ns *lab.NetNS, p *reconciler, wanted *vip.Set) (x result) {
	t.Helper()
	must(t, ns.Do(func() error {
		x = p.reconcile(wanted)
		return nil
	}))
	return x
}

func passIn(t *testing.T) *reconciler {
	t.Helper()
	o := testOptions(t).withDefaults()
	return newReconciler(o)
}

// An unreadable set, such as one that is too large, is replaced. An unchanged VIP is never
// missing from it, and neither the number of VIPs nor an earlier replacement prevents the next
// one.
func TestUnreadableSetIsReplacedAgain(t *testing.T) {
	for _, n := range []int{4, 2*maxReplaced + 2000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			list := manyVIPs(n)
			wanted := vip.NewSet(list...)
			first, restarted := passIn(t), passIn(t)
			if x := look(t, ns, first, &wanted); x.err != nil {
				t.Fatal(x.err)
			}
			for _, p := range []*reconciler{first, first, restarted} {
				p.table.ranges = func(conn *nft.Conn, family vip.Family) ([]nft.Range, error) {
					ranges, err := readRanges(conn, family)
					if err == nil && strings.Contains(texts(ranges), "30.0.0.1") {
						err = errors.New("i/o timeout")
					}
					return ranges, err
				}
				transactions := record(t, ns)
				ns.Shell(t, "nft add element inet vipgate vip4 { 30.0.0.1 }")
				if x := look(t, ns, p, &wanted); x.err != nil || !x.vips.Equal(wanted) {
					t.Errorf("%d VIPs confirmed, %v", len(x.vips), x.err)
				}
				if n > 2*maxReplaced {
					continue // more than the monitor's buffer holds
				}
				if missing := transactions.uncovered(t, list, list); len(missing) > 0 {
					t.Errorf("not in a set: %v", missing)
				}
			}
		})
	}
}

// A read that other processes interrupt is repeated: the sets are neither replaced nor revoked.
func TestInterruptedReadChangesNothing(t *testing.T) {
	list := vips("20.0.0.1/32", "20.1.0.0/24", "2000::1/128")
	wanted := vip.NewSet(list...)
	interrupted := fmt.Errorf("failed to list: %w", nlmsg.ErrInterrupted)
	for _, tt := range []struct {
		name      string
		interrupt func(*table)
		err       error
	}{
		{"a transaction during each listing", func(table *table) {
			transactions := uint32(0)
			table.generation = func(conn *nft.Conn) (uint32, error) {
				transactions++
				generation, err := conn.Generation()
				return generation + transactions, err
			}
		}, nil},
		{"interrupted listings", func(table *table) {
			table.generation = func(*nft.Conn) (uint32, error) { return 0, nil }
			table.ranges = func(*nft.Conn, vip.Family) ([]nft.Range, error) { return nil, interrupted }
		}, interrupted},
		{"different listings", func(table *table) {
			listings := 0
			table.generation = func(*nft.Conn) (uint32, error) { return 0, nil }
			table.ranges = func(conn *nft.Conn, family vip.Family) ([]nft.Range, error) {
				listings++
				ranges, err := readRanges(conn, family)
				return ranges[listings/2%2:], err
			}
		}, nlmsg.ErrInterrupted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			p := passIn(t)
			if x := look(t, ns, p, &wanted); x.err != nil {
				t.Fatal(x.err)
			}
			generation := func() (id uint32) {
				must(t, ns.Do(func() error {
					conn, err := nft.Dial()
					must(t, err)
					defer conn.Close()
					id, err = conn.Generation()
					return err
				}))
				return id
			}
			before := generation()
			tt.interrupt(p.table)
			// The desired set is a new one: the last one was written already.
			again := vip.NewSet(list...)
			if x := look(t, ns, p, &again); !errors.Is(x.err, tt.err) || !x.vips.Equal(wanted) {
				t.Errorf("%d VIPs confirmed, %v", len(x.vips), x.err)
			}
			if after := generation(); after != before {
				t.Errorf("%d transactions", after-before)
			}
		})
	}
}

// The whole content replaces one that cannot be read, also if it cannot be read afterwards.
func TestReplacementIsComplete(t *testing.T) {
	for _, n := range []int{maxReplaced - 1, maxReplaced, maxReplaced + 1} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			p, wanted := passIn(t), vip.NewSet(manyVIPs(2*n)...)
			p.table.ranges = func(*nft.Conn, vip.Family) ([]nft.Range, error) { return nil, errors.New("i/o timeout") }
			if x := look(t, ns, p, &wanted); x.err == nil {
				t.Error("confirmed without a read")
			}
			must(t, ns.Do(func() error {
				conn, err := nft.Dial()
				must(t, err)
				defer conn.Close()
				for _, family := range vip.Families {
					ranges, err := readRanges(conn, family)
					must(t, err)
					if len(ranges) != n {
						t.Errorf("%s: %d ranges", family, len(ranges))
					}
				}
				return nil
			}))
		})
	}
}

// A VIP whose range is missing in the read-back content is not confirmed.
func TestMissingElementIsNotConfirmed(t *testing.T) {
	ns := lab.NewNetNS(t)
	p := passIn(t)
	list := vips("20.0.0.1/32", "20.0.0.3/32", "2000::1/128", "2000::3/128")
	wanted := vip.NewSet(list...)
	for i, v := range list {
		p.table.ranges = func(conn *nft.Conn, family vip.Family) ([]nft.Range, error) {
			ranges, err := readRanges(conn, family)
			return slices.DeleteFunc(ranges, func(r nft.Range) bool { return r.First == v.Prefix().Addr() }), err
		}
		// The table is read back only after a change.
		ns.Shell(t, fmt.Sprintf("nft add table inet other%d", i))
		rest := vip.NewSet(slices.DeleteFunc(slices.Clone(list), func(w vip.VIP) bool { return w == v })...)
		if x := look(t, ns, p, &wanted); !x.vips.Equal(rest) {
			t.Errorf("without %s confirmed: %v", v, x.vips.Sorted())
		}
	}
	p.table.ranges = readRanges
	ns.Shell(t, "nft add table inet other")
	if x := look(t, ns, p, &wanted); x.err != nil || !x.vips.Equal(wanted) {
		t.Errorf("with all: %v, %v", x.vips.Sorted(), x.err)
	}
}

// BIRD waits for Ready, so Ready waits for the rules of each family that the kernel has.
func TestReadyNeedsRulesOfEachFamily(t *testing.T) {
	for _, tt := range []struct{ family, add string }{
		{"ipv4", "ip route add 198.51.100.0/24 dev d0 table 4097"},
		{"ipv6", "ip -6 route add 2001:db8::/32 dev d0 table 4097"},
	} {
		t.Run(tt.family, func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			must(t, lab.Veth(ns, "d0", lab.NewNetNS(t), "d1"))
			// A route out of the blackhole's table: the family's rules cannot be installed.
			ns.Shell(t, tt.add)
			r := start(t, ns, testOptions(t))
			list := vips("20.0.0.1/32", "2000::1/128")
			r.Configure(list)
			c := r.waitFor(t, "one family confirmed", func(c Confirmed) bool { return len(c.VIPs) == 1 })
			if c.Err == nil || c.Failures == 0 {
				t.Errorf("no error: %+v", c)
			}
			select {
			case <-r.Ready():
				t.Errorf("ready without the rules of %s: %v", tt.family, c.Err)
			default:
			}
			must(t, ns.IP("link", "set", "d0", "down"))
			r.waitReady(t)
			r.waitConfirmed(t, list...)
		})
	}
}
