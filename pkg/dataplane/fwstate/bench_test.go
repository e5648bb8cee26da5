package fwstate

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// crowd returns a change that creates streams with ten targets each.
func crowd(streams int, size uint32) plan.Change {
	c := plan.Change{Base: true, VIPs: map[vip.VIP]string{}}
	number := uint32(DefaultFirst)
	a4, a6 := netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")
	for i := range streams {
		name := fmt.Sprintf("stream-%d", i)
		var numbers []uint32
		for range 10 {
			numbers = append(numbers, number)
			number++
		}
		c.Targets = append(c.Targets, exampleSlots(name, numbers...)...)
		c.Streams = append(c.Streams,
			plan.StreamWrite{Desired: plan.KernelStream{
				Name: name, Size: size, Seed: 1,
				Tables: bothFamilies(filled(size, numbers...)),
			}})
		for _, a := range []*netip.Addr{&a4, &a6} {
			v, err := vip.FromPrefix(netip.PrefixFrom(*a, a.BitLen()))
			if err != nil {
				panic(err)
			}
			c.VIPs[v] = name
			*a = a.Next()
		}
	}
	return c
}

func BenchmarkLoad(b *testing.B) {
	for _, size := range []uint32{1009, 10007, 65537} {
		b.Run(fmt.Sprintf("one stream of %d", size), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				f := openConn(b, lab.NewNetNS(b), Config{})
				must(b, writeBase(f, plan.Change{Base: true}))
				c := crowd(1, size)
				b.StartTimer()
				must(b, f.Write(c))
			}
		})
	}
	b.Run("100 streams of 1009", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			f := openConn(b, lab.NewNetNS(b), Config{})
			c := crowd(100, 1009)
			b.StartTimer()
			must(b, f.Write(c))
		}
	})
}

func BenchmarkWithAHundredStreams(b *testing.B) {
	ns, net := lab.NewNetNS(b), lab.NewNetNS(b)
	must(b, lab.Veth(ns, "int0", net, "pod"))
	must(b, ns.Addr("int0", "172.16.0.1/16", "fd16::1/64"))
	f := openConn(b, ns, Config{})
	var w *Watch
	must(b, ns.Do(func() (err error) {
		w, err = Subscribe(Config{})
		return err
	}))
	defer func() { must(b, w.Close()) }()
	c := crowd(100, 1009)
	loading := time.Now()
	must(b, f.Write(c))
	b.Logf("loading, with a listener: %v, %d transactions", time.Since(loading), f.Transactions())
	slots := c.Targets
	var numbers []uint32
	for i := range slots {
		slots[i].NextHops = [len(vip.Families)]netip.Addr{
			netip.AddrFrom4([4]byte{172, 16, byte(1 + i/250), byte(1 + i%250)}),
			netip.MustParseAddr(fmt.Sprintf("fd16::1:%x", i+1)),
		}
		numbers = append(numbers, slots[i].FWMark)
	}
	began := time.Now()
	for n, err := range f.AddRoutes(slots, true) {
		b.Fatal(n, err)
	}
	b.Logf("the routes of 1000 targets, both families: %v", time.Since(began))
	now, err := f.ReadStream("stream-50")
	must(b, err)
	for _, step := range []struct {
		name string
		run  func() error
	}{
		{"read everything", func() error { _, err := f.Read(numbers); return err }},
		{"read nftables", func() error { _, err := f.readContent(); return err }},
		{"read one stream", func() error { _, err := f.ReadStream("stream-50"); return err }},
		{"read base", func() error { _, _, _, err := f.ReadBase(); return err }},
		{"read two targets", func() error { _, err := f.ReadTargets([]uint32{5000, 5999}); return err }},
		{"IPv4 route of the last", func() error { _, err := f.ResolveNextHop(5999, vip.IPv4); return err }},
		{"IPv6 route of the last", func() error { _, err := f.ResolveNextHop(5999, vip.IPv6); return err }},
		{"a tenth of one stream's entries", func() error {
			want := plan.KernelStream{Name: "stream-50", Size: 1009, Seed: 1}
			table := slices.Clone(now.Tables[0])
			for i := 0; i < len(table); i += 10 {
				table[i] = 5500 + 5501 - min(table[i], 5501)
			}
			want.Tables = bothFamilies(table)
			err := f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: want, Observed: now}}})
			want.ChainIntact = true
			now = &want
			return err
		}},
		{"one live target out and in", func() error {
			s := slots[505]
			s.Flows = [len(vip.Families)]bool{}
			return errors.Join(f.Write(plan.Change{Targets: []plan.KernelTarget{s}}),
				f.Write(plan.Change{Targets: slots[505:506]}))
		}},
		{"one route removed and added", func() error {
			return errors.Join(f.RemoveRoutes([]uint32{5505}), f.AddRoutes(slots[505:506], false).Err())
		}},
		{"flush connections of one", func() error { return f.FlushConntrack([]uint32{5505}) }},
		{"used by others", func() error { _, err := f.UsedByOthers([]uint32{7000}); return err }},
	} {
		b.Run(step.name, func(b *testing.B) {
			for b.Loop() {
				must(b, step.run())
			}
		})
	}
}
