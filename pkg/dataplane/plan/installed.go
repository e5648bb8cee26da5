package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Stage is how much of an installed object is confirmed by the kernel.
type Stage uint8

const (
	// StagePending: missing in the kernel, or incomplete.
	StagePending Stage = iota + 1
	// StageApplied: read back from the kernel.
	StageApplied
	// StageRemoving: its removal began.
	StageRemoving
)

// InstalledTarget is one target as the engine last installed it, or found it in the kernel
// at the start.
type InstalledTarget struct {
	// FWMark is its fwmark and its routing table.
	FWMark       uint32
	Stream, Name string
	// IPs are the next hops of its routing table, at most one of a family.
	IPs []netip.Addr
	// Flows reports by family whether established flows reach the target.
	Flows [len(vip.Families)]bool
	// DrainEnd is the end, and Drain the duration, of the drain of a target that is no
	// longer desired; zero for other targets.
	DrainEnd time.Time
	Drain    time.Duration
	Stage    Stage
}

// InstalledStream is one stream as the engine last installed it, or found it in the kernel
// at the start.
type InstalledStream struct {
	Name string
	// VIPs are in the order of vip.Compare.
	VIPs       []vip.VIP
	Size, Seed uint32
	// Tables are the sorted names of the targets in the Maglev table of each family; nil
	// without a table.
	Tables [len(vip.Families)][]string
	Stage  Stage
}

// Installed is everything that the engine installed, targets by fwmark.
type Installed struct {
	Targets map[uint32]InstalledTarget
	Streams map[string]InstalledStream
}

// contains reports whether sorted has a name.
func contains(sorted []string, name string) bool {
	_, ok := slices.BinarySearch(sorted, name)
	return ok
}

// SortedTargets returns targets in the order of their fwmarks.
func SortedTargets(m map[string]InstalledTarget) []InstalledTarget {
	return slices.SortedFunc(maps.Values(m), func(a, b InstalledTarget) int { return cmp.Compare(a.FWMark, b.FWMark) })
}

// AddressOf returns the address of a family, the zero Addr if there is none.
func AddressOf(ips []netip.Addr, f vip.Family) netip.Addr {
	for _, a := range ips {
		if vip.FamilyOf(a) == f {
			return a.Unmap()
		}
	}
	return netip.Addr{}
}

// SameAddresses compares next hops regardless of their order.
func SameAddresses(a, b []netip.Addr) bool {
	for _, f := range vip.Families {
		if AddressOf(a, f) != AddressOf(b, f) {
			return false
		}
	}
	return true
}

// sameTarget compares all but the stage.
func sameTarget(a, b InstalledTarget) bool {
	return a.FWMark == b.FWMark && a.Stream == b.Stream && a.Name == b.Name && a.Flows == b.Flows &&
		a.DrainEnd.Equal(b.DrainEnd) && SameAddresses(a.IPs, b.IPs)
}

// sameStream compares all but the stage.
func sameStream(a, b InstalledStream) bool {
	return a.Name == b.Name && slices.Equal(a.VIPs, b.VIPs) && a.Size == b.Size && a.Seed == b.Seed &&
		sameTables(a.Tables, b.Tables)
}

func sameTables(a, b [len(vip.Families)][]string) bool {
	for _, f := range vip.Families {
		if !slices.Equal(a[f], b[f]) {
			return false
		}
	}
	return true
}

// HasFamily reports whether a VIP is of the family.
func HasFamily(vips []vip.VIP, f vip.Family) bool {
	return slices.ContainsFunc(vips, func(v vip.VIP) bool { return v.Family() == f })
}
