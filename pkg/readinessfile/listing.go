package readinessfile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Names of readiness files. The first is the convention of Meridio 2; the second
// is isReadinessFile, for one VIP.
const (
	groupFilePrefix = "lb-ready-"
	vipFilePrefix   = "lb-vip-ready-"
)

// MaxListingAge is how old a [Listing] may be. One that is older counts as gone: what
// looks at the directory hangs. It is three missed rescans.
const MaxListingAge = 3 * time.Second

// Listing is what the readiness directory says. It is not changed once published.
type Listing struct {
	// Scanned is false before the first scan ended, well or not. Nothing is known
	// until then.
	Scanned bool
	// Groups are the groups with a file lb-ready-<group> that counts, VIPs the
	// known VIPs with a file lb-vip-ready-<address>. While the directory is gone
	// they are what OnGone leaves of them.
	Groups map[string]struct{}
	VIPs   vip.Set
	// PerVIP says that a file lb-vip-ready-<address> was seen since the start: from
	// then on the files of groups count for nothing.
	PerVIP bool
	// Everything says that every VIP is ready since the directory was never there
	// (--readiness-dir-missing=ready).
	Everything bool
	// Gone says that the directory cannot be read, Err why, GoneSince since when.
	Gone      bool
	Err       error
	GoneSince time.Time
	// DrainEnd is until when what was ready is served although the directory is
	// gone; zero unless OnGone is Drain and it runs.
	DrainEnd time.Time
	// Problems are files that are not taken, each with its name and why.
	Problems []string
	// At is when the scan began that this rests on; while a scan hangs, when that
	// was last noticed. Each rescan moves it: see MaxListingAge.
	At time.Time
	// Revision counts the listings that said something else than the one before;
	// what only At moves has the same.
	Revision uint64

	path     string
	byStream bool // the trench file has streams
	stale    map[fileName]struct{}
}

// same reports whether nothing but At differs. Groups and VIPs are shared by
// listings in which they are the same.
func (l Listing) same(o Listing) bool {
	return l.Scanned == o.Scanned && maps.Equal(l.Groups, o.Groups) && l.VIPs.Equal(o.VIPs) && l.PerVIP == o.PerVIP &&
		l.Everything == o.Everything && l.Gone == o.Gone && errorText(l.Err) == errorText(o.Err) &&
		l.DrainEnd.Equal(o.DrainEnd) && slices.Equal(l.Problems, o.Problems) && l.byStream == o.byStream &&
		maps.Equal(l.stale, o.stale)
}

// Ready reports whether a VIP is ready, and why it is or is not. streams are the
// names of the streams that serve it in the trench file. While DrainEnd is not
// zero, a VIP that is ready drains until then.
//
// Once there are files of VIPs, only the VIP's own counts. Otherwise the file of
// one of its streams makes it ready or, when the trench file has no streams at
// all, the file of any group.
func (l Listing) Ready(v vip.VIP, streams []string) (ready bool, why string) {
	switch {
	case !l.Scanned:
		return false, "the readiness directory " + l.path + " was not read yet"
	case l.Everything:
		return true, "the readiness directory " + l.path + " was never there, and --readiness-dir-missing=ready"
	case l.PerVIP:
		ready, why = l.VIPs.Has(v), VIPFile(v.Prefix().Addr())
		if _, old := l.stale[fileName{vip: v.Prefix().Addr()}]; old && !ready {
			return false, "readiness file " + why + tooOld
		}
	case l.byStream && len(streams) == 0:
		return false, "no stream serves it"
	case l.byStream:
		ready, why = l.anyOf(streams)
	case len(l.Groups) > 0:
		ready, why = true, groupFilePrefix+"*"
	default:
		why = groupFilePrefix + "*"
	}
	switch {
	case l.Gone && ready:
		return true, "readiness file " + why + " was there when the directory was lost: " + l.Err.Error()
	case l.Gone:
		return false, l.Err.Error()
	case ready:
		return true, "readiness file " + why
	}
	return false, "no readiness file " + why + " in " + l.path
}

const tooOld = " was not touched lately (--readiness-max-age)"

// anyOf looks for the file of one of the groups and names it, or all.
func (l Listing) anyOf(groups []string) (found bool, files string) {
	const shown = 3
	var names []string
	for i, g := range groups {
		if _, ready := l.Groups[g]; ready {
			return true, groupFilePrefix + g
		}
		_, old := l.stale[fileName{group: g}]
		switch {
		case i < shown && old:
			names = append(names, groupFilePrefix+g+" young enough")
		case i < shown:
			names = append(names, groupFilePrefix+g)
		case i == shown:
			names = append(names, "…")
		}
	}
	return false, strings.Join(names, " or ")
}

// GroupFile is the name of the file that makes a group ready.
func GroupFile(group string) string { return groupFilePrefix + group }

// VIPFile is the name of the file that makes the VIP with this first address ready.
func VIPFile(a netip.Addr) string { return vipFilePrefix + a.String() }

// readinessName is what the name of a readiness file says: a group or an address.
type fileName struct {
	group string
	vip   netip.Addr
}

// parseReadinessName reads the name of a file. Names that are none of isReadinessFile say
// nothing, isReadinessFile is false then.
func parseName(name string) (n fileName, isReadinessFile bool, problem string) {
	if text, is := strings.CutPrefix(name, vipFilePrefix); is {
		a, err := netip.ParseAddr(text)
		switch {
		case err != nil:
			return n, true, fmt.Sprintf("%q is no IP address: write the first address of a VIP, such as %s20.0.0.1", text,
				vipFilePrefix)
		case a.Zone() != "":
			return n, true, fmt.Sprintf("%q has a zone: leave it out", text)
		}
		return fileName{vip: a.Unmap()}, true, ""
	}
	if text, is := strings.CutPrefix(name, groupFilePrefix); is {
		if text == "" {
			return n, true, "it names no group: write " + groupFilePrefix + "<name of the stream>"
		}
		return fileName{group: text}, true, ""
	}
	return n, false, ""
}

// Names are what files may be about.
type Names struct {
	// Streams are the names of the streams in the trench file. Without any every
	// group is known.
	Streams []string
	VIPs    []vip.VIP
}

// names is Names to look up.
type names struct {
	streams map[string]struct{}
	vips    map[netip.Addr]vip.VIP // by the first address, which no two share
}

func newNames(n Names) *names {
	known := &names{streams: make(map[string]struct{}, len(n.Streams)), vips: make(map[netip.Addr]vip.VIP, len(n.VIPs))}
	for _, s := range n.Streams {
		known.streams[s] = struct{}{}
	}
	for _, v := range n.VIPs {
		known.vips[v.Prefix().Addr()] = v
	}
	return known
}

// problem says why a file is about nothing that is known.
func (k *names) problem(n fileName) string {
	if n.group == "" {
		if _, known := k.vips[n.vip]; !known {
			return "no VIP of the attractor begins with " + n.vip.String()
		}
	} else if _, known := k.streams[n.group]; !known && len(k.streams) > 0 {
		return "the trench file has no stream of this name"
	}
	return ""
}

// take puts what a file says into the listing, if it is about something known.
func (k *names) take(n fileName, l *Listing) {
	switch {
	case k.problem(n) != "":
	case n.group == "":
		l.VIPs[k.vips[n.vip]] = struct{}{}
	default:
		l.Groups[n.group] = struct{}{}
	}
}
