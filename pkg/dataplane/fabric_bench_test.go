package dataplane

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// crowd is a change that makes streams with ten targets each.
func crowd(streams int, size uint32) change {
	c := change{base: true, vips: map[vip.VIP]string{}}
	number := uint32(DefaultFirst)
	a4, a6 := netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")
	for i := range streams {
		name := fmt.Sprintf("stream-%d", i)
		var numbers []uint32
		for range 10 {
			numbers = append(numbers, number)
			number++
		}
		c.slots = append(c.slots, exampleSlots(name, numbers...)...)
		c.streams = append(c.streams, streamWrite{want: streamContent{name: name, size: size, seed: 1, tables: bothFamilies(filled(size, numbers...))}})
		for _, a := range []*netip.Addr{&a4, &a6} {
			v, err := vip.FromPrefix(netip.PrefixFrom(*a, a.BitLen()))
			if err != nil {
				panic(err)
			}
			c.vips[v] = name
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
				f := openFabric(b, lab.NewNetNS(b), Options{})
				must(b, writeBase(f, change{base: true}))
				c := crowd(1, size)
				b.StartTimer()
				must(b, f.write(c))
			}
		})
	}
	b.Run("100 streams of 1009", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			f := openFabric(b, lab.NewNetNS(b), Options{})
			c := crowd(100, 1009)
			b.StartTimer()
			must(b, f.write(c))
		}
	})
}

func BenchmarkWithAHundredStreams(b *testing.B) {
	ns, net := lab.NewNetNS(b), lab.NewNetNS(b)
	must(b, lab.Veth(ns, "int0", net, "pod"))
	must(b, ns.Addr("int0", "172.16.0.1/16", "fd16::1/64"))
	f := openFabric(b, ns, Options{})
	var w *watch
	must(b, ns.Do(func() (err error) {
		w, err = newWatch(Options{})
		return err
	}))
	defer func() { must(b, w.close()) }()
	c := crowd(100, 1009)
	loading := time.Now()
	must(b, f.write(c))
	b.Logf("loading, with somebody who listens: %v, %d transactions", time.Since(loading), f.transactions())
	slots := c.slots
	var numbers []uint32
	for i := range slots {
		slots[i].hops = [len(vip.Families)]netip.Addr{
			netip.AddrFrom4([4]byte{172, 16, byte(1 + i/250), byte(1 + i%250)}),
			netip.MustParseAddr(fmt.Sprintf("fd16::1:%x", i+1)),
		}
		numbers = append(numbers, slots[i].number)
	}
	began := time.Now()
	for n, err := range f.addWays(slots) {
		b.Fatal(n, err)
	}
	b.Logf("the ways of 1000 targets, both families: %v", time.Since(began))
	b.Run("read everything", func(b *testing.B) {
		for b.Loop() {
			_, err := f.read(numbers)
			must(b, err)
		}
	})
	b.Run("read nftables", func(b *testing.B) {
		for b.Loop() {
			_, err := f.readContent()
			must(b, err)
		}
	})
	b.Run("read one stream", func(b *testing.B) {
		for b.Loop() {
			_, err := f.readStream("stream-50")
			must(b, err)
		}
	})
	b.Run("read base", func(b *testing.B) {
		for b.Loop() {
			_, _, err := f.readBase()
			must(b, err)
		}
	})
	b.Run("read two targets", func(b *testing.B) {
		for b.Loop() {
			_, err := f.readSlots([]uint32{5000, 5999})
			must(b, err)
		}
	})
	b.Run("way of the last", func(b *testing.B) {
		for b.Loop() {
			_, err := f.way(5999, vip.IPv4)
			must(b, err)
		}
	})
	b.Run("IPv6 way of the last", func(b *testing.B) {
		for b.Loop() {
			_, err := f.way(5999, vip.IPv6)
			must(b, err)
		}
	})
	now, err := f.readStream("stream-50")
	must(b, err)
	b.Run("a tenth of one stream's entries", func(b *testing.B) {
		for b.Loop() {
			want := streamContent{name: "stream-50", size: 1009, seed: 1}
			table := slices.Clone(now.tables[0])
			for i := 0; i < len(table); i += 10 {
				table[i] = 5500 + 5501 - min(table[i], 5501)
			}
			want.tables = bothFamilies(table)
			must(b, f.write(change{streams: []streamWrite{{want: want, now: now}}}))
			want.chain = true
			now = &want
		}
	})
	b.Run("one live target out and in", func(b *testing.B) {
		for b.Loop() {
			s := slots[505]
			s.flows = [len(vip.Families)]bool{}
			must(b, f.write(change{slots: []slotContent{s}}))
			must(b, f.write(change{slots: []slotContent{slots[505]}}))
		}
	})
	b.Run("one way removed and added", func(b *testing.B) {
		for b.Loop() {
			must(b, f.removeWays([]uint32{5505}))
			for _, err := range f.addWays(slots[505:506]) {
				must(b, err)
			}
		}
	})
	b.Run("forget one", func(b *testing.B) {
		for b.Loop() {
			must(b, f.forget([]uint32{5505}))
		}
	})
	b.Run("taken", func(b *testing.B) {
		for b.Loop() {
			_, err := f.takenAmong([]uint32{7000})
			must(b, err)
		}
	})
}
