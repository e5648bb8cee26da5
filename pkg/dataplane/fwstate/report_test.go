package fwstate

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// defaultReceiveBuffer sets the receive buffer of an unprivileged process.
func defaultReceiveBuffer(t *testing.T, port uint32) {
	t.Helper()
	found := false
	for fd := range 1024 { // sockets of other netlink protocols may have the same port
		addr, err := unix.Getsockname(fd)
		if a, ok := addr.(*unix.SockaddrNetlink); err == nil && ok && a.Pid == port {
			must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 212_992/2)) // the kernel doubles it
			found = true
		}
	}
	if !found {
		t.Fatal("the socket was not found")
	}
}

// The kernel's echo fits the default receive buffer. Larger changes are read back instead.
func TestReportedElementsAreFew(t *testing.T) {
	f := openConn(t, lab.NewNetNS(t), Config{})
	defaultReceiveBuffer(t, f.nft.Port)
	c := exampleChange()
	c.Streams[0].Desired.Size = 1009
	c.Streams[0].Desired.Tables = bothFamilies(filled(1009, 5000, 5001, 5002))
	must(t, writeBase(f, c))
	for _, changed := range []int{maxReported / 2, maxReported/2 + 1} {
		now, err := f.ReadStream("web")
		must(t, err)
		want := *now
		for _, family := range vip.Families {
			want.Tables[family] = append([]uint32(nil), now.Tables[family]...)
		}
		for i := range changed { // each is removed and added
			want.Tables[i%2][i/2] = 5000 + (want.Tables[i%2][i/2]-5000+1)%3
		}
		w := plan.StreamWrite{Desired: want, Observed: now}
		must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{w}}))
		if reported := len(f.reported["maglev4/web"]) > 0; reported != (2*changed <= maxReported) {
			t.Errorf("%d elements are reported: %v", 2*changed, reported)
		}
		if read, err := f.ReadTables(w); err != nil || !plan.SameStream(read, &want) {
			t.Errorf("after %d elements: %+v, %v", 2*changed, read, err)
		}
	}
}

// Every entry of a table can be reported, including the first and the last. An entry beyond the
// table is ignored, and the known stream is not modified in place.
func TestReportOfEntries(t *testing.T) {
	known := &plan.KernelStream{Name: "web", Size: 5, Tables: bothFamilies(filled(5, 5000, 5001))}
	before := slices.Clone(known.Tables[vip.IPv4])
	r := report{
		plan.MaglevMap(vip.IPv4, "web"): {
			{index: 0, fwmark: 0}, {index: 0, fwmark: 7}, {index: 4, fwmark: 8}, {index: 5, fwmark: 9},
		},
		plan.MaglevMap(vip.IPv4, "other"): {{index: 1, fwmark: 9}},
		plan.MaglevMap(vip.IPv6, "web"):   {{index: 4, fwmark: 0}},
	}
	got := r.of(known)
	want4, want6 := slices.Clone(before), slices.Clone(before)
	want4[0], want4[4], want6[4] = 7, 8, 0
	if !slices.Equal(got.Tables[vip.IPv4], want4) || !slices.Equal(got.Tables[vip.IPv6], want6) {
		t.Errorf("got %v, want %v and %v", got.Tables, want4, want6)
	}
	if !slices.Equal(known.Tables[vip.IPv4], before) {
		t.Errorf("what was known is now %v", known.Tables[vip.IPv4])
	}
}
