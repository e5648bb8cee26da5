package kernel

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Removals of BIRD's routes count unless BIRD, or the kernel with an interface, removed them.
func TestRouteNotifications(t *testing.T) {
	o := Options{}.withDefaults()
	w := &watch{}
	for _, c := range []struct {
		name            string
		kind            netlink.HeaderType
		port, table     uint32
		protocol        uint8
		concerns, count bool
	}{
		{"BIRD adds", unix.RTM_NEWROUTE, 5, o.TableID, unix.RTPROT_BIRD, false, false},
		{"BIRD removes", unix.RTM_DELROUTE, 5, o.TableID, unix.RTPROT_BIRD, false, false},
		{"the kernel removes", unix.RTM_DELROUTE, 0, o.TableID, unix.RTPROT_BIRD, false, false},
		{"another process removes", unix.RTM_DELROUTE, 7, o.TableID, unix.RTPROT_BIRD, true, true},
		{"a new BIRD adds", unix.RTM_NEWROUTE, 6, o.TableID, unix.RTPROT_BIRD, false, false},
		{"the former BIRD removes", unix.RTM_DELROUTE, 5, o.TableID, unix.RTPROT_BIRD, true, true},
		{"another process adds its own", unix.RTM_NEWROUTE, 7, o.TableID, unix.RTPROT_STATIC, true, false},
		{"another process removes its own", unix.RTM_DELROUTE, 7, o.TableID, unix.RTPROT_STATIC, true, false},
		{"the blackhole's table", unix.RTM_NEWROUTE, 7, o.blackholeTable(), unix.RTPROT_BIRD, true, false},
		{"another table", unix.RTM_DELROUTE, 7, 254, unix.RTPROT_BIRD, false, false},
	} {
		r := rtnetlink.Route{
			Table: c.table, Protocol: c.protocol, Prefix: rtnetlink.DefaultPrefix(vip.IPv4), Type: unix.RTN_BLACKHOLE,
		}
		request := r.Replace()
		m := netlink.Message{
			Header: netlink.Header{Type: c.kind, PID: c.port}, Data: request.Data[unix.SizeofNlMsghdr:],
		}
		before := w.removed.Load()
		if got := w.concernsPolicy(o, m); got != c.concerns || (w.removed.Load() != before) != c.count {
			t.Errorf("%s: concerns %t, counts %t", c.name, got, w.removed.Load() != before)
		}
	}
}
