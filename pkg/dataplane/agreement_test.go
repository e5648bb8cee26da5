package dataplane

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// names returns the targets in the kernel's table of a stream.
func (s *site) names(stream string, family vip.Family) []string {
	s.t.Helper()
	f := openConn(s.t, s.ns, fwstate.Config{})
	got, err := f.ReadStream(stream)
	s.must(err)
	if got == nil {
		s.t.Fatalf("no stream %s", stream)
	}
	var numbers []uint32
	for _, n := range got.Tables[family] {
		if !slices.Contains(numbers, n) {
			numbers = append(numbers, n)
		}
	}
	slots, err := f.ReadTargets(numbers)
	s.must(err)
	names := make([]string, 0, len(got.Tables[family]))
	for _, n := range got.Tables[family] {
		name := "absent " + strconv.FormatUint(uint64(n), 10)
		if slot := slots[n]; slot != nil {
			name = slot.Name
		}
		names = append(names, name)
	}
	return names
}

func differing(a, b []string) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// Every pod selects the same target for a flow: the table depends only on the names of the
// stream's ready targets, M and the seed. The targets therefore have different fwmarks in each pod
// here, and are added and removed in a different order.
func TestPodsAgreeOnTables(t *testing.T) {
	const targets, size = 10, 1009
	stream := func(order ...int) *plan.Stream {
		s := siteStream("a", bothVIPs)
		s.Size, s.DrainTime = size, 50*time.Millisecond
		for _, i := range order {
			s.Targets = append(s.Targets, siteTarget(i, plan.Serving, plan.Serving))
		}
		return s
	}
	one, two := newSite(t), newSite(t)
	p, q := one.start(), two.start(func(o *Options) { o.First = 7000 })
	p.configure(stream(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
	for _, order := range [][]int{{9}, {9, 4, 2}, {2, 4}, {10, 4, 2, 3}, {10, 9, 8, 7, 6, 5, 4, 3, 2, 1}} {
		q.configure(stream(order...))
	}
	// Targets that returned may be draining until their drain time ends.
	all := func(s plan.State) bool { return len(s.Streams["a"].Serving[vip.IPv6]) == targets }
	p.wait("ten targets", all)
	q.wait("ten targets", all)
	before := one.names("a", vip.IPv4)
	for _, f := range vip.Families {
		if n := differing(one.names("a", f), two.names("a", f)); n > 0 {
			t.Errorf("%s: %d of %d entries lead to other targets in the other pod", f, n, size)
		}
	}

	// At most 12 % of the flows may move when one of ten targets is removed.
	p.configure(stream(1, 2, 3, 4, 5, 6, 7, 8, 9))
	q.configure(stream(9, 8, 7, 6, 5, 4, 3, 2, 1))
	after := one.names("a", vip.IPv4)
	if n := differing(after, two.names("a", vip.IPv4)); n > 0 {
		t.Errorf("%d of %d entries differ after one target went", n, size)
	}
	if moved := differing(before, after); moved*100 > 12*size || slices.Contains(after, "t10") {
		t.Errorf("%d of %d entries moved when one of ten targets went", moved, size)
	}
}
