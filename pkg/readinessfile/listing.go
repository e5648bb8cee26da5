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

// Prefixes of the names of readiness files.
const (
	groupFilePrefix = "lb-ready-" // the convention of Meridio 2
	vipFilePrefix   = "lb-vip-ready-"
)

// MaxListingAge is the age from which a [Listing] counts for nothing, because the reader hangs: three
// missed rescans.
const MaxListingAge = 3 * time.Second

// Listing is the state of the readiness directory. It is immutable.
type Listing struct {
	// Scanned reports whether a scan has ended, even in an error. Until then nothing is known.
	Scanned bool
	// Groups are the groups whose file counts, VIPs the known VIPs whose file counts. While the
	// directory is gone they are what Options.OnGone keeps of them.
	Groups map[string]struct{}
	VIPs   vip.Set
	// PerVIP reports whether the file of a VIP was seen since the start: from then on the files of
	// groups do not count.
	PerVIP bool
	// Everything reports whether every VIP is ready because the directory has never existed
	// (--readiness-dir-missing=ready).
	Everything bool
	// Gone reports whether the directory cannot be read; Err is the reason.
	Gone bool
	Err  error
	// DrainEnd is the end of the drain after the directory was lost; zero: no drain.
	DrainEnd time.Time
	// Problems are the files that are ignored, each with its name and the reason.
	Problems []string
	// At is the start of the scan that this listing is based on; while a scan hangs, the time of the
	// last check that it does. Each rescan advances it: see MaxListingAge.
	At time.Time
	// Revision counts the listings that differ from their predecessor in more than At.
	Revision uint64

	path     string
	byStream bool // the trench file has streams
	stale    map[fileName]struct{}
}

// same reports whether the listings differ at most in At and Revision.
func (l Listing) same(o Listing) bool {
	return l.Scanned == o.Scanned && maps.Equal(l.Groups, o.Groups) && l.VIPs.Equal(o.VIPs) && l.PerVIP == o.PerVIP &&
		l.Everything == o.Everything && l.Gone == o.Gone && errorText(l.Err) == errorText(o.Err) &&
		l.DrainEnd.Equal(o.DrainEnd) && slices.Equal(l.Problems, o.Problems) && l.byStream == o.byStream &&
		maps.Equal(l.stale, o.stale)
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Ready reports whether a VIP is ready, and why. streams are the names of the streams in the trench
// file that serve it. While DrainEnd is not zero, a VIP that is ready drains until then.
//
// Once there are files of VIPs, only the VIP's own counts. Otherwise the file of one of its streams
// makes it ready or, when the trench file has no streams at all, the file of any group.
func (l Listing) Ready(v vip.VIP, streams []string) (ready bool, why string) {
	switch {
	case !l.Scanned:
		return false, "the readiness directory " + l.path + " was not read yet"
	case l.Everything:
		return true, "the readiness directory " + l.path + " has never existed, and --readiness-dir-missing=ready"
	case l.PerVIP:
		ready, why = l.VIPs.Has(v), VIPFile(v.Prefix().Addr())
		if _, stale := l.stale[fileName{vip: v.Prefix().Addr()}]; stale && !ready {
			return false, "readiness file " + why + " was not touched lately (--readiness-max-age)"
		}
	case l.byStream && len(streams) == 0:
		return false, "no stream serves it"
	case l.byStream:
		ready, why = l.anyOf(streams)
	default:
		ready, why = len(l.Groups) > 0, groupFilePrefix+"*"
	}
	switch {
	case l.Gone && ready:
		return true, "readiness file " + why + " existed when the directory was lost: " + l.Err.Error()
	case l.Gone:
		return false, l.Err.Error()
	case ready:
		return true, "readiness file " + why
	}
	return false, "no readiness file " + why + " in " + l.path
}

// anyOf looks for the file of one of the groups and returns its name, or those of the first groups.
func (l Listing) anyOf(groups []string) (found bool, files string) {
	const shown = 3
	var names []string
	for i, g := range groups {
		if _, ready := l.Groups[g]; ready {
			return true, GroupFile(g)
		}
		_, stale := l.stale[fileName{group: g}]
		switch {
		case i < shown && stale:
			names = append(names, GroupFile(g)+" young enough")
		case i < shown:
			names = append(names, GroupFile(g))
		case i == shown:
			names = append(names, "…")
		}
	}
	return false, strings.Join(names, " or ")
}

// GroupFile returns the name of the file that makes a group ready.
func GroupFile(group string) string { return groupFilePrefix + group }

// VIPFile returns the name of the file that makes the VIP with this first address ready.
func VIPFile(a netip.Addr) string { return vipFilePrefix + a.String() }

// fileName is the parsed name of a readiness file: a group or an address.
type fileName struct {
	group string
	vip   netip.Addr
}

// parseName parses a file name. problem is the defect in the name of a readiness file.
func parseName(name string) (n fileName, isReadinessFile bool, problem string) {
	if text, ok := strings.CutPrefix(name, vipFilePrefix); ok {
		a, err := netip.ParseAddr(text)
		switch {
		case err != nil:
			const example = vipFilePrefix + "20.0.0.1"
			return n, true, fmt.Sprintf("%q is not an IP address; use the first address of a VIP, such as %s", text, example)
		case a.Zone() != "":
			return n, true, fmt.Sprintf("%q has a zone; omit it", text)
		}
		return fileName{vip: a.Unmap()}, true, ""
	}
	group, ok := strings.CutPrefix(name, groupFilePrefix)
	if ok && group == "" {
		return n, true, "it names no group; use " + groupFilePrefix + "<name of the stream>"
	}
	return fileName{group: group}, ok, ""
}

// names are the streams and VIPs that files can refer to.
type names struct {
	streams map[string]struct{}    // empty: every group is known
	vips    map[netip.Addr]vip.VIP // by first address, which no two VIPs share
}

func newNames(streams []string, vips []vip.VIP) *names {
	known := &names{streams: map[string]struct{}{}, vips: map[netip.Addr]vip.VIP{}}
	for _, s := range streams {
		known.streams[s] = struct{}{}
	}
	for _, v := range vips {
		known.vips[v.Prefix().Addr()] = v
	}
	return known
}

// problem returns why a file refers to nothing that is known; "" if it does not.
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

// add adds what a file refers to, if it is known.
func (k *names) add(n fileName, l *Listing) {
	switch {
	case k.problem(n) != "":
	case n.group == "":
		l.VIPs[k.vips[n.vip]] = struct{}{}
	default:
		l.Groups[n.group] = struct{}{}
	}
}
