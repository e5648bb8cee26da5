package cli

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/readinessfile"
)

// Refusals collects everything that a command line is refused for.
type Refusals []error

// Add adds an error, if it is one.
func (r *Refusals) Add(err error) {
	if err != nil {
		*r = append(*r, err)
	}
}

// If adds an error when refused is true.
func (r *Refusals) If(refused bool, format string, args ...any) {
	if refused {
		*r = append(*r, fmt.Errorf(format, args...))
	}
}

// Within adds an error unless a flag's duration lies between least and most.
func (r *Refusals) Within(flag string, d, least, most time.Duration) {
	r.If(d < 0, "%s=%v must not be negative", flag, d)
	r.If(d >= 0 && d < least, "%s=%v: at least %v", flag, d, least)
	r.If(d > most, "%s=%v: at most %v", flag, d, most)
}

// MaxAge adds an error for an age of readiness files that their writers cannot keep.
func (r *Refusals) MaxAge(flag string, d time.Duration) {
	r.Within(flag, d, 0, MaxFileAge)
	r.If(d > 0 && d < readinessfile.MinMaxAge, "%s=%v: at least %v, since files are touched once a second and some file systems keep times to two; or 0 for any age",
		flag, d, readinessfile.MinMaxAge)
}

// Socket adds an error for the path of a socket that cannot be used.
func (r *Refusals) Socket(flag, address string) {
	path, err := identity.SocketPath(address)
	switch {
	case err != nil:
		r.Add(fmt.Errorf("%s: %w", flag, err))
	case strings.Contains(path, ":/"):
		r.Add(fmt.Errorf("%s: %s is not a unix socket: write unix:///PATH", flag, address))
	}
}

// Port is a TCP port and the flag that sets it; 0 is none.
type Port struct {
	Flag string
	Port uint16
}

// Ports adds an error for each port that an earlier one has: the pod's addresses
// and the loopback address are shared by all listeners.
func (r *Refusals) Ports(ports ...Port) {
	for i, p := range ports {
		for _, other := range ports[:i] {
			r.If(p.Port != 0 && p.Port == other.Port, "%s and %s are both %d: choose another port for one of them", other.Flag, p.Flag, p.Port)
		}
	}
}

// Err returns a [UsageError] with everything that was added, or nil.
func (r Refusals) Err() error {
	if len(r) == 0 {
		return nil
	}
	return &UsageError{errors.Join(r...)}
}

// Bounds of times on the command line: longer ones are typing errors, and would
// let VIPs attract traffic that is not forwarded.
const (
	MaxDrainTime    = time.Hour
	MaxStaleGrace   = 10 * time.Minute
	MaxSettle       = time.Minute
	MaxReadyTimeout = time.Hour
	MaxMaxBackoff   = 5 * time.Minute
	MaxGrace        = time.Hour
	MaxFileAge      = 24 * time.Hour
	MinScanTime     = time.Second
	MaxScanTime     = time.Hour
)

// Numbers are those of the network namespace that lb and frontend share and must not
// both use: routing tables, rule priorities, bits of marks.
type Numbers struct {
	FirstTable, LastTable uint32
	FirstRule, LastRule   int
	Mask                  uint32
	// Table, Rule and Marks name the variables of the other program's numbers.
	Table, Rule, Marks string
}

// FrontendNumbers are those of a frontend.
func FrontendNumbers(table uint32, priority int, mask uint32) Numbers {
	return Numbers{FirstTable: table, LastTable: table + 1, FirstRule: priority, LastRule: priority + 2, Mask: mask}
}

// LBNumbers are those of the data plane of an lb.
func LBNumbers(table, mask uint32, priority int) Numbers {
	return Numbers{FirstTable: table, LastTable: mask, FirstRule: priority, LastRule: priority + 2, Mask: mask}
}

// OfFrontend are the numbers of the frontend beside an lb: those of its variables
// where the environment has them, else its defaults.
func OfFrontend() Numbers {
	mask := kernel.DefaultMask
	if _, m, ok := strings.Cut(os.Getenv("VIPGATE_MARK"), "/"); ok {
		if n, err := strconv.ParseUint(m, 0, 32); err == nil {
			mask = int(n)
		}
	}
	n := FrontendNumbers(uint32(variable("TABLE_ID", kernel.DefaultTableID)), variable("RULE_PRIORITY", kernel.DefaultPriority), uint32(mask))
	n.Table, n.Rule, n.Marks = "VIPGATE_TABLE_ID", "VIPGATE_RULE_PRIORITY", "VIPGATE_MARK"
	return n
}

// OfLB are the numbers of the lb beside a frontend, in the same way; false when it
// is known to have no data plane.
func OfLB() (Numbers, bool) {
	n := LBNumbers(uint32(variable("FIRST_TABLE", dataplane.DefaultFirst)), uint32(variable("MARK_MASK", dataplane.DefaultMask)), variable("DATAPLANE_PRIORITY", dataplane.DefaultPriority))
	n.Table, n.Rule, n.Marks = "VIPGATE_FIRST_TABLE", "VIPGATE_DATAPLANE_PRIORITY", "VIPGATE_MARK_MASK"
	return n, os.Getenv("VIPGATE_DATAPLANE") != "none"
}

// variable is the number in an environment variable, or fallback.
func variable(name string, fallback int) int {
	if n, err := strconv.ParseUint(os.Getenv("VIPGATE_"+name), 0, 32); err == nil {
		return int(n)
	}
	return fallback
}

// Overlap adds an error for each kind of number that both use. The flags set n; other
// names the program that has the other numbers.
func (r *Refusals) Overlap(n, with Numbers, table, rule, mark, other string) {
	r.If(n.FirstTable <= with.LastTable && with.FirstTable <= n.LastTable,
		"%s=%d: overlaps the routing tables of %s, %d to %d; %s", table, n.FirstTable, other, with.FirstTable, with.LastTable, remedy(with.Table))
	r.If(n.FirstRule <= with.LastRule && with.FirstRule <= n.LastRule,
		"%s=%d: overlaps the rule priorities of %s, %d to %d; %s", rule, n.FirstRule, other, with.FirstRule, with.LastRule, remedy(with.Rule))
	r.If(n.Mask&with.Mask != 0, "%s has bits of the mark mask of %s, %#x; %s", mark, other, with.Mask, remedy(with.Marks))
}

func remedy(variable string) string {
	return "use another number, or set " + variable + " here as it is set there"
}
