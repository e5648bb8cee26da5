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
)

// Refusals collects the reasons for which a command line is refused.
type Refusals []error

// Add adds an error unless it is nil.
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

// Within adds an error unless a flag's duration lies between least and most. A longer duration is
// a typing error, which would let VIPs attract traffic that is not forwarded.
func (r *Refusals) Within(flag string, d, least, most time.Duration) {
	r.If(d < 0, "%s=%v must not be negative", flag, d)
	r.If(d >= 0 && d < least, "%s=%v: at least %v", flag, d, least)
	r.If(d > most, "%s=%v: at most %v", flag, d, most)
}

// Socket adds an error for an unusable socket path.
func (r *Refusals) Socket(flag, address string) {
	path, err := identity.SocketPath(address)
	r.If(err != nil, "%s: %w", flag, err)
	r.If(strings.Contains(path, ":/"), "%s: %s is not a unix socket: write unix:///PATH", flag, address)
}

// Port is a TCP port with the flag that sets it; 0 disables the listener.
type Port struct {
	Flag string
	Port uint16
}

// Ports adds an error for each port that occurs twice, because all listeners share the pod's
// addresses and the loopback address.
func (r *Refusals) Ports(ports ...Port) {
	for i, p := range ports {
		for _, other := range ports[:i] {
			r.If(p.Port != 0 && p.Port == other.Port, "%s and %s are both %d: choose another port for one of them",
				other.Flag, p.Flag, p.Port)
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

// Numbers holds resources of the network namespace that lb and frontend share: routing tables,
// rule priorities and fwmark bits. The numbers of both programs must not overlap.
type Numbers struct {
	program               string
	firstTable, lastTable uint32
	firstRule, lastRule   int
	mask                  uint32
	table, rule, mark     string // the flags that set them; mark with its value
}

// FrontendNumbers returns the numbers of a frontend.
func FrontendNumbers(table uint32, priority int, mark, mask uint32) Numbers {
	return Numbers{
		"the frontend", table, table + 1, priority, priority + 2, mask,
		"--table-id", "--rule-priority", fmt.Sprintf("--mark=%#x/%#x", mark, mask),
	}
}

// LBNumbers returns the numbers of an lb's data plane.
func LBNumbers(table, mask uint32, priority int) Numbers {
	return Numbers{
		"the data plane of lb", table, mask, priority, priority + 2, mask,
		"--first-table", "--dataplane-priority", fmt.Sprintf("--mark-mask=%#x", mask),
	}
}

// OverlapFrontend adds an error for each number that the frontend in the same pod also uses. Its
// numbers are read from its environment variables, with its defaults for unset variables.
func (r *Refusals) OverlapFrontend(n Numbers) {
	// The containers of a pod share a block of variables, so lb can read the frontend's settings.
	mask := kernel.DefaultMask
	if _, m, ok := strings.Cut(os.Getenv("VIPGATE_MARK"), "/"); ok {
		if n, err := strconv.ParseUint(m, 0, 32); err == nil {
			mask = int(n)
		}
	}
	table, priority := number("TABLE_ID", kernel.DefaultTableID), number("RULE_PRIORITY", kernel.DefaultPriority)
	r.overlap(n, FrontendNumbers(uint32(table), priority, 0, uint32(mask)))
}

// OverlapLB does the same for the lb in the same pod, unless its data plane is disabled.
func (r *Refusals) OverlapLB(n Numbers) {
	// An unset variable does not prove that lb runs without a data plane.
	if os.Getenv("VIPGATE_DATAPLANE") != "none" {
		table, mask := number("FIRST_TABLE", dataplane.DefaultFirst), number("MARK_MASK", dataplane.DefaultMask)
		r.overlap(n, LBNumbers(uint32(table), uint32(mask), number("DATAPLANE_PRIORITY", dataplane.DefaultPriority)))
	}
}

func number(name string, fallback int) int {
	if n, err := strconv.ParseUint(os.Getenv("VIPGATE_"+name), 0, 32); err == nil {
		return int(n)
	}
	return fallback
}

func (r *Refusals) overlap(n, with Numbers) {
	remedy := func(flag string) string {
		name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "=")
		return fmt.Sprintf("use another number, or set VIPGATE_%s here as it is set there",
			strings.ToUpper(strings.ReplaceAll(name, "-", "_")))
	}
	r.If(n.firstTable <= with.lastTable && with.firstTable <= n.lastTable,
		"%s=%d: overlaps the routing tables of %s, %d to %d; %s",
		n.table, n.firstTable, with.program, with.firstTable, with.lastTable, remedy(with.table))
	r.If(n.firstRule <= with.lastRule && with.firstRule <= n.lastRule,
		"%s=%d: overlaps the rule priorities of %s, %d to %d; %s",
		n.rule, n.firstRule, with.program, with.firstRule, with.lastRule, remedy(with.rule))
	r.If(n.mask&with.mask != 0, "%s has bits of the mark mask of %s, %#x; %s",
		n.mark, with.program, with.mask, remedy(with.mark))
}
