package dataplane

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// stage is how far the kernel is known to have an installed object.
type stage uint8

const (
	// stagePending: not, or only partly, in the kernel.
	stagePending stage = iota + 1
	// stageApplied: read back from the kernel.
	stageApplied
	// stageRemoving: perhaps no longer in the kernel.
	stageRemoving
)

// installedTarget is one target of one stream as the engine last installed it, or found
// it at the start.
type installedTarget struct {
	// Number is its firewall mark and its routing table.
	Number       uint32
	Stream, Name string
	// IPs are the next hops of its routing table, at most one of a family.
	IPs []netip.Addr
	// Flows reports by family whether established flows reach the target.
	Flows [len(vip.Families)]bool
	// DrainEnd is when the drain of a target that is no longer wanted ends, Drain how
	// long it takes in all; zero for other targets.
	DrainEnd time.Time
	Drain    time.Duration
	Stage    stage
}

// installedStream is one stream as the engine last installed it, or found it at the
// start.
type installedStream struct {
	Name string
	// VIPs are in the order of vip.Compare.
	VIPs       []vip.VIP
	Size, Seed uint32
	// Tables are the sorted names of the targets in the Maglev table of each family; nil
	// without a table.
	Tables [len(vip.Families)][]string
	Stage  stage
}

// installed is the engine's model of what it installed in the kernel.
type installed struct {
	Targets map[uint32]installedTarget
	Streams map[string]installedStream
}

// label is what the comment of a target's rule holds, so that the next process finds it
// in the kernel: "STREAM/TARGET ADDRESS... drain=END/DURATION". The end is by the wall
// clock; both are in milliseconds.
type label struct {
	stream, name string
	ips          [len(vip.Families)]netip.Addr
	drainEnd     int64
	drain        int64
}

const drainField = "drain="

func (t installedTarget) label() label {
	l := label{stream: t.Stream, name: t.Name}
	for _, f := range vip.Families {
		l.ips[f] = addressOf(t.IPs, f)
	}
	if !t.DrainEnd.IsZero() {
		l.drainEnd, l.drain = t.DrainEnd.UnixMilli(), t.Drain.Milliseconds()
	}
	return l
}

func (l label) String() string {
	s := l.stream + "/" + l.name
	for _, a := range l.ips {
		if a.IsValid() {
			s += " " + a.String()
		}
	}
	if l.drainEnd != 0 {
		s += " " + drainField + strconv.FormatInt(l.drainEnd, 10) + "/" + strconv.FormatInt(l.drain, 10)
	}
	return s
}

// parseLabel reads the comment of a target's rule; unknown fields are ignored.
func parseLabel(comment string) (l label) {
	fields := strings.Fields(comment)
	if len(fields) == 0 {
		return l
	}
	l.stream, l.name, _ = strings.Cut(fields[0], "/")
	for _, field := range fields[1:] {
		if drain, ok := strings.CutPrefix(field, drainField); ok {
			end, duration, _ := strings.Cut(drain, "/")
			l.drainEnd, _ = strconv.ParseInt(end, 10, 64)
			l.drain, _ = strconv.ParseInt(duration, 10, 64)
		} else if a, err := netip.ParseAddr(field); err == nil {
			l.ips[vip.FamilyOf(a)] = a
		}
	}
	return l
}

// drainEndAt is when the drain that a label names ends. A jump of the wall clock never
// makes a drain longer than it was to be.
func (l label) drainEndAt(now time.Time) (end time.Time, drain time.Duration) {
	if l.drainEnd == 0 {
		return end, 0
	}
	drain = time.Duration(l.drain) * time.Millisecond
	return now.Add(min(time.UnixMilli(l.drainEnd).Sub(now), drain)), drain
}
