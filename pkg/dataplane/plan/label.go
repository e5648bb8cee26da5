package plan

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

const drainField = "drain="

func (t InstalledTarget) Label() Label {
	l := Label{Stream: t.Stream, Name: t.Name}
	for _, f := range vip.Families {
		l.IPs[f] = AddressOf(t.IPs, f)
	}
	if !t.DrainEnd.IsZero() {
		l.DrainEnd, l.Drain = t.DrainEnd.UnixMilli(), t.Drain.Milliseconds()
	}
	return l
}

// Label is the comment of a target's nftables rule, from which the next process recovers the
// target: "STREAM/TARGET ADDRESS... drain=END/DURATION". END is wall clock time; both are
// in milliseconds.
type Label struct {
	Stream, Name string
	IPs          [len(vip.Families)]netip.Addr
	DrainEnd     int64
	Drain        int64
}

func (l Label) String() string {
	s := l.Stream + "/" + l.Name
	for _, a := range l.IPs {
		if a.IsValid() {
			s += " " + a.String()
		}
	}
	if l.DrainEnd != 0 {
		s += " " + drainField + strconv.FormatInt(l.DrainEnd, 10) + "/" + strconv.FormatInt(l.Drain, 10)
	}
	return s
}

// ParseLabel reads the comment of a target's rule; unknown fields are ignored.
func ParseLabel(comment string) (l Label) {
	fields := strings.Fields(comment)
	if len(fields) == 0 {
		return l
	}
	l.Stream, l.Name, _ = strings.Cut(fields[0], "/")
	for _, field := range fields[1:] {
		if drain, ok := strings.CutPrefix(field, drainField); ok {
			end, duration, _ := strings.Cut(drain, "/")
			l.DrainEnd, _ = strconv.ParseInt(end, 10, 64)
			l.Drain, _ = strconv.ParseInt(duration, 10, 64)
		} else if a, err := netip.ParseAddr(field); err == nil {
			l.IPs[vip.FamilyOf(a)] = a
		}
	}
	return l
}

// DrainEndAt returns the end and the duration of the drain. A jump of the wall clock never
// makes a drain longer than its duration.
func (l Label) DrainEndAt(now time.Time) (end time.Time, drain time.Duration) {
	if l.DrainEnd == 0 {
		return end, 0
	}
	drain = time.Duration(l.Drain) * time.Millisecond
	return now.Add(min(time.UnixMilli(l.DrainEnd).Sub(now), drain)), drain
}

// MaxLabel is the longest comment of an nftables rule, whose length is one byte.
const MaxLabel = 250
