package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/machine"
)

// printer prints lines, from several goroutines.
type printer struct {
	mu  sync.Mutex
	w   io.Writer
	err error
}

func (p *printer) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		if _, err := fmt.Fprintf(p.w, format+"\n", args...); err != nil {
			p.err = fmt.Errorf("print: %w", err)
		}
	}
}

// note prints an informational line.
func (p *printer) note(format string, args ...any) {
	p.printf("%s        %s", time.Now().Format(timeFormat), fmt.Sprintf(format, args...))
}

// Hold is how long VIPs were held after one cause.
type Hold struct {
	Cause    string          `json:"cause"`
	Times    int             `json:"times"` // VIPs and gateways
	Median   time.Duration   `json:"median_ns"`
	P99      time.Duration   `json:"p99_ns"`
	Longest  time.Duration   `json:"longest_ns"`
	Bound    time.Duration   `json:"bound_ns"` // without slack
	Exceeded int             `json:"exceeded"` // longer than the bound, but not than bound and slack
	Samples  []time.Duration `json:"samples_ns"`
}

// Summary is the output of --json.
type Summary struct {
	machine.Machine
	Seed            uint64           `json:"seed"`
	External        bool             `json:"external"` // the speaker is an FRR
	Faults          int              `json:"faults"`
	Injected        int              `json:"injected"`
	Groups          int              `json:"groups"`
	Passed          bool             `json:"passed"`
	Took            time.Duration    `json:"took_ns"`
	Kinds           map[string]int   `json:"kinds"`
	Holds           []Hold           `json:"holds"` // of each cause
	SlowestRecovery time.Duration    `json:"slowest_recovery_ns"`
	LatestTimer     time.Duration    `json:"latest_timer_ns"`
	Excused         int              `json:"excused_updates"`
	Most            map[string]usage `json:"most"`
	Problem         []string         `json:"problem,omitempty"`
}

// summarize groups the measures of an observer by cause. It returns every cause that has a rule, in
// the order of the rules.
func summarize(measures []measure, external bool) []Hold {
	samples := map[string][]time.Duration{}
	for _, m := range measures {
		samples[m.cause] = append(samples[m.cause], m.held)
	}
	var all []Hold
	for _, r := range causes(external) {
		all = append(all, newHold(r.cause, r.bound, samples[r.cause]))
	}
	return all
}

// newHold computes the statistics of a cause, by nearest rank.
func newHold(cause string, bound time.Duration, samples []time.Duration) Hold {
	h := Hold{Cause: cause, Bound: bound, Times: len(samples), Samples: slices.Sorted(slices.Values(samples))}
	if h.Times == 0 {
		return h
	}
	rank := func(percent int) time.Duration { return h.Samples[(percent*h.Times+99)/100-1] }
	h.Median, h.P99, h.Longest = rank(50), rank(99), h.Samples[h.Times-1]
	for _, held := range samples {
		if held > bound {
			h.Exceeded++
		}
	}
	return h
}

// print prints the summary.
func (s Summary) print(out *printer) {
	out.printf("")
	out.printf("%d faults in %d groups, %s", s.Injected, s.Groups, s.Took.Round(time.Second))
	for _, name := range slices.Sorted(maps.Keys(s.Kinds)) {
		out.printf("  %4d  %s", s.Kinds[name], name)
	}
	out.printf("")
	out.printf("how long a VIP was still held after its cause (where nothing else disturbed it):")
	out.printf("  %-34s %6s %10s %10s %10s %10s %s", "cause", "times", "median", "p99", "longest", "bound",
		"beyond it, within the slack")
	for _, h := range s.Holds {
		if h.Times > 0 {
			out.printf("  %-34s %6d %10s %10s %10s %10s %d", h.Cause, h.Times, short(h.Median), short(h.P99), short(h.Longest),
				short(h.Bound), h.Exceeded)
		}
	}
	out.printf("")
	out.printf("slowest recovery after everything was healed: %s; latest timer: %s; UPDATEs excused by a busy "+
		"machine: %d", short(s.SlowestRecovery), short(s.LatestTimer), s.Excused)
	for _, name := range slices.Sorted(maps.Keys(s.Most)) {
		m := s.Most[name]
		out.printf(
			"most of %s at a calm point: %d files, %d goroutines, %d KiB resident", name, m.Files, m.Goroutines, m.Memory>>10,
		)
	}
}

// write puts the summary into a file.
func (s Summary) write(path string) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("summary: %w", err)
	}
	return nil
}

// keepLogs copies the logs of a lab to a folder that outlives the run.
func keepLogs(fx *fixture, seed uint64) (string, error) {
	dir, err := os.MkdirTemp("", fmt.Sprintf("vipgate-chaos-%d-", seed))
	if err != nil {
		return "", err
	}
	err = filepath.WalkDir(fx.Dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if ext := filepath.Ext(path); ext != ".log" && ext != ".conf" && ext != ".yaml" {
			return nil
		}
		name, err := filepath.Rel(fx.Dir, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		return os.WriteFile(to, b, 0o600)
	})
	return dir, err
}
