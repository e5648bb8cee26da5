package probe

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Report is the state of all VIPs at one moment. Its JSON is the output of --once.
type Report struct {
	VIPs []VIP `json:"vips"`
	// Paths counts the paths by state.
	Reachable int `json:"reachablePaths"`
	Dead      int `json:"deadPaths"`
	Unknown   int `json:"unknownPaths"`
}

// VIP is the state of one VIP.
type VIP struct {
	VIP    vip.VIP    `json:"vip"`
	Family vip.Family `json:"family"`
	State  State      `json:"state"`
	Reason string     `json:"reason,omitempty"` // why it is unknown without a path
	// Latency is the mean duration of the last checks of reachable paths, in seconds; 0 without one.
	Latency float64 `json:"latencySeconds,omitempty"`
	Paths   []Path  `json:"paths"`
}

// Path is the state of one path.
type Path struct {
	Source  string  `json:"source"`
	State   State   `json:"state"`
	Latency float64 `json:"latencySeconds,omitempty"`
	Reason  string  `json:"reason,omitempty"`
	// LastHop is the last router of a dead path that answered; "" if none did.
	LastHop string `json:"lastHop,omitempty"`
}

// Report returns the state of all VIPs, ordered by family and address.
func (prober *Prober) Report(now time.Time) *Report {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	report, valid := &Report{VIPs: make([]VIP, 0, len(prober.targets))}, prober.valid()
	for _, target := range prober.targets {
		v := VIP{
			VIP: target.VIP, Family: target.VIP.Family(), State: Unknown, Reason: target.Unchecked,
			Paths: make([]Path, 0, len(target.paths)),
		}
		reachable, dead := 0, 0
		for _, path := range target.paths {
			p := path.report(now, valid)
			v.Paths = append(v.Paths, p)
			switch p.State {
			case Reachable:
				reachable++
				v.Latency += p.Latency
			case Dead:
				dead++
			default:
				report.Unknown++
			}
		}
		switch {
		case dead > 0 && reachable > 0:
			v.State = Partial
		case dead > 0:
			v.State = Dead
		case reachable > 0:
			v.State = Reachable
		}
		if reachable > 0 {
			v.Latency /= float64(reachable)
		}
		report.Reachable, report.Dead = report.Reachable+reachable, report.Dead+dead
		report.VIPs = append(report.VIPs, v)
	}
	return report
}

// report returns the state of a path; Prober.mu is held.
func (path *path) report(now time.Time, valid time.Duration) Path {
	p := Path{Source: path.from(), State: path.state(now, valid)}
	switch p.State {
	case Reachable:
		p.Latency = path.took.Seconds()
	case Dead:
		p.Reason, p.LastHop = path.reason, path.hop
	default:
		p.Reason = cmp.Or(path.notRun, path.reason, "not checked yet")
		if path.verdict != Unknown && path.notRun == "" {
			p.Reason = fmt.Sprintf("not checked for %v", now.Sub(path.judged).Round(time.Millisecond))
		}
	}
	return p
}

// Complete reports whether every path has a recent verdict and, if traced, every dead path was
// traced unless it cannot be.
func (prober *Prober) Complete(now time.Time, traced bool) bool {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	valid := prober.valid()
	for _, target := range prober.targets {
		for _, path := range target.paths {
			switch path.state(now, valid) {
			case Unknown:
				return false
			case Dead:
				if traced && path.tracedAt.IsZero() && connectPort(target.Checks[0]) != 0 {
					return false
				}
			}
		}
	}
	return true
}

// Wait waits until every path has a verdict, at most as long as the first verdicts and traces take.
func (prober *Prober) Wait(ctx context.Context) {
	prober.mu.Lock()
	limit := prober.interval + time.Duration(prober.Fall+1)*(prober.checking+busyRecheck) + traceTime
	prober.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !prober.Complete(time.Now(), true) {
		select {
		case <-prober.changed:
		case <-ctx.Done():
			return
		}
	}
}

// State returns the worst state: Dead if any path is dead, Unknown if any VIP or path is unknown.
func (report *Report) State() State {
	state := Reachable
	for _, v := range report.VIPs {
		if v.State == Unknown {
			state = Unknown
		}
	}
	switch {
	case report.Dead > 0:
		return Dead
	case report.Unknown > 0:
		return Unknown
	}
	return state
}

// JSON returns the report as a document.
func (report *Report) JSON() (string, error) {
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return "", fmt.Errorf("failed to render the report as JSON: %w", err)
	}
	return string(text) + "\n", nil
}

// Table returns a row for each VIP, and one for each path that is not reachable.
func (report *Report) Table() string {
	var text strings.Builder
	// Nothing writes to a strings.Builder in vain.
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "VIP\tSTATE\tPATHS\tLATENCY\tREASON")
	for _, v := range report.VIPs {
		latency, reachable := "-", 0
		for _, p := range v.Paths {
			if p.State == Reachable {
				reachable++
			}
		}
		if reachable > 0 {
			latency = fmt.Sprintf("%.1fms", v.Latency*1e3)
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d of %d\t%s\t%s\n", v.VIP, v.State, reachable, len(v.Paths), latency, v.Reason)
		for _, p := range v.Paths {
			if p.State == Reachable {
				continue
			}
			reason := p.Reason
			if p.State == Dead {
				reason += "; last answer: " + cmp.Or(p.LastHop, "none")
			}
			_, _ = fmt.Fprintf(table, "  from %s\t%s\t\t\t%s\n", p.Source, p.State, reason)
		}
	}
	_ = table.Flush()
	return text.String()
}
