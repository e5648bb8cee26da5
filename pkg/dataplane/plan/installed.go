package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Stage is the progress of an object's installation or removal in the kernel.
type Stage uint8

const (
	// StagePending: missing in the kernel, or incomplete.
	StagePending Stage = iota + 1
	// StageApplied: read back from the kernel.
	StageApplied
	// StageRemoving: removal has started.
	StageRemoving
)

// Label identifies a target and is the comment of its nftables rule, from which the next process
// recovers the target: "STREAM/TARGET ADDRESS... drain=END/DURATION".
type Label struct {
	Stream, Name string
	IPs          [len(vip.Families)]netip.Addr
	// DrainEndMilli is a wall clock time, DrainMilli a duration; both are in milliseconds.
	DrainEndMilli, DrainMilli int64
}

// InstalledTarget is one target as the engine installed it, or recovered it from the kernel. Its
// size of 128 bytes is the limit up to which Go stores map values inline.
type InstalledTarget struct {
	// FWMark is both the fwmark and the routing table ID.
	FWMark uint32
	// Flows reports by family whether established flows reach the target.
	Flows [len(vip.Families)]bool
	Stage Stage
	Label
	// DrainEnd is the end of the drain of a target that is no longer desired; zero for other
	// targets. Its monotonic clock reading makes it independent of wall clock jumps.
	DrainEnd time.Time
}

// InstalledStream is one stream as the engine installed it, or recovered it from the kernel.
type InstalledStream struct {
	Name string
	// VIPs is sorted by vip.Compare.
	VIPs       []vip.VIP
	Size, Seed uint32
	// Tables holds the sorted names of the targets in the Maglev table of each family.
	Tables [len(vip.Families)][]string
	// Match lists the forwarded ports; nil forwards all packets.
	Match []Port
	Stage Stage
}

const drainField = "drain="

// Addresses returns the addresses of the target.
func (l Label) Addresses() []netip.Addr {
	return slices.DeleteFunc(l.IPs[:], func(a netip.Addr) bool { return !a.IsValid() })
}

func (l Label) String() string {
	s := l.Stream + "/" + l.Name
	for _, a := range l.Addresses() {
		s += " " + a.String()
	}
	if l.DrainEndMilli != 0 {
		s += " " + drainField + strconv.FormatInt(l.DrainEndMilli, 10) + "/" + strconv.FormatInt(l.DrainMilli, 10)
	}
	return s
}

// ParseLabel parses the comment of a target's rule and ignores unknown fields.
func ParseLabel(comment string) (label Label) {
	fields := strings.Fields(comment)
	if len(fields) == 0 {
		return label
	}
	label.Stream, label.Name, _ = strings.Cut(fields[0], "/")
	for _, field := range fields[1:] {
		if drain, ok := strings.CutPrefix(field, drainField); ok {
			end, duration, _ := strings.Cut(drain, "/")
			label.DrainEndMilli, _ = strconv.ParseInt(end, 10, 64)
			label.DrainMilli, _ = strconv.ParseInt(duration, 10, 64)
		} else if a, err := netip.ParseAddr(field); err == nil {
			label.IPs[vip.FamilyOf(a)] = a
		}
	}
	return label
}

// Drain starts the drain of a target that is no longer desired.
func (target *InstalledTarget) Drain(end time.Time, d time.Duration) {
	target.DrainEnd, target.DrainEndMilli, target.DrainMilli = end, end.UnixMilli(), d.Milliseconds()
}

// ResumeDrain continues the drain in the label after a restart. Wall clock jumps never extend a
// drain beyond its duration.
func (target *InstalledTarget) ResumeDrain(now time.Time) {
	if target.DrainEndMilli == 0 {
		return
	}
	d := time.Duration(target.DrainMilli) * time.Millisecond
	target.Drain(now.Add(min(time.UnixMilli(target.DrainEndMilli).Sub(now), d)), d)
}

// Kernel returns the expected kernel state of the target.
func (target InstalledTarget) Kernel() KernelTarget {
	kernel := KernelTarget{
		FWMark: target.FWMark, Label: target.Label, ChainIntact: true, Flows: target.Flows,
		NextHops: target.IPs,
	}
	for f, hop := range target.IPs {
		kernel.Rules[f] = hop.IsValid()
	}
	kernel.Blackhole = kernel.Rules
	return kernel
}

// Kernel returns the expected kernel state of the stream. caches holds its last Maglev tables.
func (s InstalledStream) Kernel(targets map[string]InstalledTarget, caches *TableCaches) *KernelStream {
	k := &KernelStream{Name: s.Name, ChainIntact: true, Size: s.Size, Seed: s.Seed, Match: s.Match}
	for _, family := range vip.Families {
		if HasFamily(s.VIPs, family) || s.Tables[family] != nil {
			k.Tables[family] = caches[family].table(s.Tables[family], targets, s.Size, s.Seed)
		}
	}
	if len(k.Families()) == 0 {
		k.Size, k.Seed = 0, 0 // no rule contains them
	}
	return k
}

// SortedTargets returns targets in the order of their fwmarks.
func SortedTargets(m map[string]InstalledTarget) []InstalledTarget {
	return slices.SortedFunc(maps.Values(m), func(a, b InstalledTarget) int { return cmp.Compare(a.FWMark, b.FWMark) })
}

// ByFamily returns the addresses indexed by family; a missing one is the zero Addr.
func ByFamily(ips []netip.Addr) (byFamily [len(vip.Families)]netip.Addr) {
	for _, a := range ips {
		byFamily[vip.FamilyOf(a)] = a.Unmap()
	}
	return byFamily
}

// sameTarget compares two targets, ignoring the stage.
func sameTarget(a, b InstalledTarget) bool {
	a.Stage = b.Stage
	return a == b
}

// sameStream compares two streams, ignoring the stage.
func sameStream(a, b InstalledStream) bool {
	return slices.Equal(a.VIPs, b.VIPs) && a.Size == b.Size && a.Seed == b.Seed && SameMatch(a.Match, b.Match) &&
		sameTables(a.Tables, b.Tables)
}

func sameTables(a, b [len(vip.Families)][]string) bool {
	return slices.EqualFunc(a[:], b[:], slices.Equal[[]string])
}

// HasFamily reports whether vips contains a VIP of the family.
func HasFamily(vips []vip.VIP, f vip.Family) bool {
	return slices.ContainsFunc(vips, func(v vip.VIP) bool { return v.Family() == f })
}
