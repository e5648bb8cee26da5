package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// RouteUpdate is an announcement of a prefix that a gateway received, including a repeated one,
// or the end of its route by a withdrawal or with its session.
type RouteUpdate struct {
	// At is the wall clock of the gateway. BIRD reads it once in each round of its loop: it can be a
	// little too early, never late.
	At        time.Time
	Prefix    netip.Prefix
	Withdrawn bool
	// Session is BIRD's name of the session, such as trench0; "" with other daemons.
	Session string
	// Attributes of an announcement.
	ASPath      []string
	Communities []string
}

// GracefulShutdown reports whether the announcement carried 65535:0 (RFC 8326).
func (u RouteUpdate) GracefulShutdown() bool { return slices.Contains(u.Communities, "(65535,0)") }

// String returns the update as one line.
func (u RouteUpdate) String() string {
	at := u.At.Format("15:04:05.000000")
	if u.Withdrawn {
		return fmt.Sprintf("%s %s withdrawn", at, u.Prefix)
	}
	return fmt.Sprintf("%s %s announced path=%v communities=%v", at, u.Prefix, u.ASPath, u.Communities)
}

func (g *Gateway) tracePath() string { return filepath.Join(g.dir, "trace.log") }

// Trace returns every update that the gateway received so far, in order and without gaps: unlike a
// RouteWatcher it misses no change that was reverted.
func (g *Gateway) Trace() ([]RouteUpdate, error) {
	return readTrace(g.Name, g.tracePath(), parseTrace)
}

// readTrace reads the log of a gateway's daemon.
func readTrace(gateway, path string, parse func(string) ([]RouteUpdate, error)) ([]RouteUpdate, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // it has just been started
	}
	if err != nil {
		return nil, fmt.Errorf("trace of gateway %s: %w", gateway, err)
	}
	return parse(string(b))
}

// traceTime is BIRD's `iso long us`.
const traceTime = "2006-01-02 15:04:05.000000"

// Lines of BIRD's log, after date, time and level.
var (
	announcedPattern = regexp.MustCompile(`^heard (\S+) \(path ([^)]*)\) \(clist (.*)\) (\S+)$`)
	removedPattern   = regexp.MustCompile(`^(trench[^.\s]+)\S* > removed (?:\[\S+\] )?(\S+)`)
)

// parseTrace reads BIRD's log, where these lines report received updates:
//
//	DATE TIME <INFO> heard 20.0.0.1/32 (path 8103 8103) (clist (65535,0)) trench0
//	DATE TIME <TRACE> trench0.ipv4 > removed [sole] 20.0.0.1/32 0L 7G unicast
func parseTrace(log string) ([]RouteUpdate, error) {
	var trace []RouteUpdate
	for line := range strings.Lines(log) {
		line, whole := strings.CutSuffix(line, "\n")
		words := strings.SplitN(line, " ", 4)
		if !whole || len(words) < 4 {
			continue // still being written, or a line of another format
		}
		u := RouteUpdate{}
		var prefix string
		if m := announcedPattern.FindStringSubmatch(words[3]); m != nil {
			prefix, u.ASPath, u.Communities, u.Session = m[1], strings.Fields(m[2]), strings.Fields(m[3]), m[4]
		} else if m := removedPattern.FindStringSubmatch(words[3]); m != nil {
			u.Session, prefix, u.Withdrawn = m[1], m[2], true
		} else {
			continue
		}
		var errAt, errPrefix error
		u.At, errAt = time.ParseInLocation(traceTime, words[0]+" "+words[1], time.Local)
		u.Prefix, errPrefix = netip.ParsePrefix(prefix)
		if err := errors.Join(errAt, errPrefix); err != nil {
			return nil, fmt.Errorf("line %q of BIRD's log: %w", line, err)
		}
		trace = append(trace, u)
	}
	return trace, nil
}

// adjRIBIn holds the prefixes that each neighbor has announced and not withdrawn: the logs of
// some daemons contain the end of a session, but not the loss of its routes.
type adjRIBIn map[string][]netip.Prefix

// announce notes that a neighbor announced a prefix.
func (held adjRIBIn) announce(neighbor string, u RouteUpdate) RouteUpdate {
	if !slices.Contains(held[neighbor], u.Prefix) {
		held[neighbor] = append(held[neighbor], u.Prefix)
	}
	return u
}

// withdraw notes a withdrawal. It returns no update if the prefix was not announced.
func (held adjRIBIn) withdraw(neighbor string, at time.Time, p netip.Prefix) []RouteUpdate {
	i := slices.Index(held[neighbor], p)
	if i < 0 {
		return nil
	}
	held[neighbor] = slices.Delete(held[neighbor], i, i+1)
	return []RouteUpdate{{At: at, Prefix: p, Withdrawn: true}}
}

// down records the end of a neighbor's session and of its routes.
func (held adjRIBIn) down(neighbor string, at time.Time) []RouteUpdate {
	var ended []RouteUpdate
	for _, p := range held[neighbor] {
		ended = append(ended, RouteUpdate{At: at, Prefix: p, Withdrawn: true})
	}
	delete(held, neighbor)
	return ended
}
