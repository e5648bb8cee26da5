package readinessfile

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Prefixes of the names of readiness files.
const (
	groupFilePrefix = "lb-ready-" // the convention of Meridio 2
	vipFilePrefix   = "lb-vip-ready-"
)

// MaxListingAge is the age from which a [Listing] is ignored: the reader missed three rescans.
const MaxListingAge = 3 * time.Second

// Listing is the state of the readiness directory. It is immutable.
type Listing struct {
	// Scanned reports whether a scan has ended, even with an error.
	Scanned bool
	// Files holds the canonical names of the known files that count. While the directory is gone, it
	// holds the files that Options.OnGone keeps.
	Files map[string]struct{}
	// PerVIP reports whether the file of a VIP of the trench file was seen since the start. The files
	// of groups no longer count then.
	PerVIP bool
	// Everything reports whether every VIP is ready because the directory has never existed
	// (--readiness-dir-missing=ready).
	Everything bool
	// Gone reports whether the directory cannot be read; Err is the reason.
	Gone bool
	Err  error
	// DrainEnd is the end of the drain after the directory was lost; zero: no drain.
	DrainEnd time.Time
	// Problems lists the ignored files, each with its name and the reason.
	Problems []string
	// At is the start of the scan that produced this listing; while a scan hangs, the time of the last
	// check for its result. Each rescan advances At: see MaxListingAge.
	At time.Time
	// Revision counts the listings that differ from their predecessor in more than At.
	Revision uint64

	path     string
	byStream bool                // the trench file has streams
	stale    map[string]struct{} // canonical names of the files that are too old
}

// same reports whether the listings are equal except for At and Revision.
func (listing Listing) same(other Listing) bool {
	listing.At, listing.Revision = other.At, other.Revision
	return reflect.DeepEqual(listing, other)
}

// Ready reports whether a VIP is ready, and why. streams names the streams in the trench file that
// serve the VIP. A ready VIP drains until DrainEnd, unless DrainEnd is zero.
//
// Once a file of any VIP was seen, only the file of this VIP counts. Otherwise the file of one of
// its streams makes the VIP ready or, if the trench file has no streams, the file of any group.
func (listing Listing) Ready(v vip.VIP, streams []string) (ready bool, why string) {
	switch {
	case !listing.Scanned:
		return false, "the readiness directory " + listing.path + " was not read yet"
	case listing.Everything:
		return true, "the readiness directory " + listing.path + " has never existed, and --readiness-dir-missing=ready"
	case listing.PerVIP:
		why = vipFile(v.Prefix().Addr())
		_, ready = listing.Files[why]
		if _, stale := listing.stale[why]; stale && !ready {
			return false, "readiness file " + why + " was not touched lately (--readiness-max-age)"
		}
	case listing.byStream && len(streams) == 0:
		return false, "no stream serves it"
	case listing.byStream:
		ready, why = listing.anyOf(streams)
	default:
		ready, why = len(listing.Files) > 0, groupFilePrefix+"*"
	}
	switch {
	case listing.Gone && ready:
		return true, "readiness file " + why + " existed when the directory was lost: " + listing.Err.Error()
	case listing.Gone:
		return false, listing.Err.Error()
	case ready:
		return true, "readiness file " + why
	}
	return false, "no readiness file " + why + " in " + listing.path
}

// anyOf looks for the file of one of the groups. It returns the name of that file, or the names of
// the files of the first groups if none exists.
func (listing Listing) anyOf(groups []string) (found bool, files string) {
	const shown = 3
	var names []string
	for index, group := range groups {
		file := groupFile(group)
		if _, ready := listing.Files[file]; ready {
			return true, file
		}
		if _, stale := listing.stale[file]; stale {
			file += " young enough"
		}
		switch {
		case index < shown:
			names = append(names, file)
		case index == shown:
			names = append(names, "…")
		}
	}
	return false, strings.Join(names, " or ")
}

// groupFile returns the name of the file that makes a group ready.
func groupFile(group string) string { return groupFilePrefix + group }

// vipFile returns the name of the file that makes the VIP with this first address ready.
func vipFile(addr netip.Addr) string { return vipFilePrefix + addr.String() }

// isReadinessFile reports whether a name has the prefix of a readiness file; it may be invalid.
func isReadinessFile(name string) bool {
	return strings.HasPrefix(name, groupFilePrefix) || strings.HasPrefix(name, vipFilePrefix)
}

// canonical returns the name of a readiness file with its address in canonical form. problem is the
// reason why the name is invalid.
func canonical(name string) (file, problem string) {
	text, ok := strings.CutPrefix(name, vipFilePrefix)
	if !ok {
		if name == groupFilePrefix {
			return "", "it names no group; use " + groupFilePrefix + "<name of the stream>"
		}
		return name, ""
	}
	addr, err := netip.ParseAddr(text)
	switch {
	case err != nil:
		const example = vipFilePrefix + "20.0.0.1"
		return "", fmt.Sprintf("%q is not an IP address; use the first address of a VIP, such as %s", text, example)
	case addr.Zone() != "":
		return "", fmt.Sprintf("%q has a zone; omit it", text)
	}
	return vipFile(addr.Unmap()), ""
}

// known holds the file names of the streams and VIPs in the trench file.
type known struct {
	files    map[string]struct{}
	byStream bool // the trench file has streams; otherwise every group is known
}

// problem returns why a file name matches no stream or VIP; "" if it matches one.
func (known known) problem(file string) string {
	if _, ok := known.files[file]; ok {
		return ""
	}
	if address, ok := strings.CutPrefix(file, vipFilePrefix); ok {
		return "no VIP of the attractor begins with " + address
	}
	if known.byStream {
		return "the trench file has no stream of this name"
	}
	return ""
}
