package midstream

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// benchmarkStream returns a stream with ten targets, of which 800 slots from first on are asked, or
// all targets if first is negative.
func benchmarkStream(family vip.Family, number, first int) Stream {
	address := netip.MustParseAddr([]string{"172.16.1.1", "fd00:16::1"}[family])
	stream := Stream{
		Name: fmt.Sprintf("stream-%03d", number), Size: 1009, Seed: 1, FWMarks: map[uint32]plan.LinkAddress{},
	}
	for target := range 10 {
		stream.FWMarks[uint32(5000+100*number+target)] = plan.LinkAddress{2, 0, 0, byte(number), 1, byte(target)}
	}
	if first < 0 {
		stream.Everyone = map[uint32]netip.Addr{}
		for fwmark := range stream.FWMarks {
			stream.Everyone[fwmark] = address
		}
		return stream
	}
	stream.Asked[0] = map[uint32]netip.Addr{}
	for slot := first; slot < first+800; slot++ {
		stream.Asked[0][uint32(slot)] = address
	}
	return stream
}

// BenchmarkApply changes one of several streams to and fro.
func BenchmarkApply(b *testing.B) {
	for _, change := range []struct {
		name  string
		first int
		to    func(stream *Stream, family vip.Family) (remains bool)
	}{
		{"a tenth of the slots", 0, func(stream *Stream, family vip.Family) bool {
			stream.Asked = benchmarkStream(family, 0, 100).Asked
			return true
		}},
		{"one of all targets", -1, func(stream *Stream, _ vip.Family) bool {
			stream.FWMarks, stream.Everyone = maps.Clone(stream.FWMarks), maps.Clone(stream.Everyone)
			delete(stream.FWMarks, 5000)
			delete(stream.Everyone, 5000)
			return true
		}},
		{"stream that asks all targets", -1, func(*Stream, vip.Family) bool { return false }},
	} {
		for _, count := range []int{1, 100} {
			b.Run(fmt.Sprint(change.name, "/", count), func(b *testing.B) {
				ns := lab.NewNetNS(b)
				var conn *nft.Conn
				harness.Must(b, ns.Do(func() (err error) {
					conn, err = nft.Dial()
					return err
				}))
				defer conn.Close()
				var known, other Streams
				for _, family := range vip.Families {
					for i := range count {
						known[family] = append(known[family], benchmarkStream(family, i, change.first))
					}
					changed := known[family][0]
					if change.to(&changed, family) {
						other[family] = append(other[family], changed)
					}
					other[family] = append(other[family], known[family][1:]...)
				}
				if _, err := Apply(conn, Mode{Mask: 0xffffff}, known, nil); err != nil {
					b.Fatal(err)
				}
				for b.Loop() {
					if _, err := Apply(conn, Mode{Mask: 0xffffff}, other, &known); err != nil {
						b.Fatal(err)
					}
					known, other = other, known
				}
			})
		}
	}
}
