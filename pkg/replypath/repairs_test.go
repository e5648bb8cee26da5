package replypath

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The delay of a part that is removed repeatedly doubles from 0.1 s to 10 s, and is reset after 30
// s without a repair. Other parts are not delayed.
func TestDelaysOfRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := repairs{}
		if r.due() != nil {
			t.Error("a repair is due without a part")
		}
		repair := func(want time.Duration) {
			t.Helper()
			began := time.Now()
			if !r.allow([]string{"contested"}, began) {
				t.Fatal("a repair is delayed twice")
			}
			r.done([]string{"contested"}, began)
			if r.allow([]string{"contested"}, began) || r.allow(nil, began) || !r.allow([]string{"contested", "new"}, began) {
				t.Error("the contested part alone is to be delayed")
			}
			<-r.due()
			if delay := time.Since(began); delay != want || r.due() != nil {
				t.Errorf("the next repair after %v, want %v", delay, want)
			}
		}
		delay := 100 * time.Millisecond
		for range 10 {
			repair(delay)
			delay = min(2*delay, 10*time.Second)
		}
		time.Sleep(29*time.Second - delay)
		repair(10 * time.Second)
		time.Sleep(31*time.Second - delay)
		r.done([]string{"other"}, time.Now())
		if first := time.Now(); r.allow([]string{"other"}, first) {
			t.Error("the other part is not delayed")
		}
		repair(100 * time.Millisecond)
	})
}

// Relevant notifications trigger a comparison. Notifications about foreign routes and neighbors
// may be frequent and do not.
func TestConcerningNotifications(t *testing.T) {
	attribute := func(kind uint16, data []byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(data)))
		return append(binary.NativeEndian.AppendUint16(b, kind), data...)
	}
	route := func(table uint32, protocol byte) []byte {
		header := [unix.SizeofRtMsg]byte{0: unix.AF_INET, 1: 24, 5: protocol, 7: unix.RTN_UNICAST}
		return slices.Concat(header[:], attribute(unix.RTA_DST, []byte{10, 0, 0, 0}),
			attribute(unix.RTA_TABLE, binary.NativeEndian.AppendUint32(nil, table)))
	}
	neighbor := func(address string, state byte) []byte {
		header := [unix.SizeofNdMsg]byte{0: unix.AF_INET, 8: state}
		return slices.Concat(header[:], attribute(unix.NDA_DST, netip.MustParseAddr(address).AsSlice()))
	}
	for name, tt := range map[string]struct {
		kind netlink.HeaderType
		data []byte
		want bool
	}{
		"own route":              {unix.RTM_DELROUTE, route(254, 180), true},
		"route in own table":     {unix.RTM_NEWROUTE, route(7667, 3), true},
		"other route":            {unix.RTM_NEWROUTE, route(254, 12), false},
		"neighbor that failed":   {unix.RTM_NEWNEIGH, neighbor("10.0.0.1", unix.NUD_FAILED), true},
		"neighbor that is gone":  {unix.RTM_DELNEIGH, neighbor("10.0.0.1", unix.NUD_STALE), true},
		"neighbor that answered": {unix.RTM_NEWNEIGH, neighbor("10.0.0.1", unix.NUD_REACHABLE), false},
		"placeholder":            {unix.RTM_NEWNEIGH, neighbor("169.254.76.67", unix.NUD_STALE), true},
		"rule":                   {unix.RTM_DELRULE, nil, true},
		"link":                   {unix.RTM_NEWLINK, nil, true},
	} {
		if got := concerns(netlink.Message{Header: netlink.Header{Type: tt.kind}, Data: tt.data}); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
