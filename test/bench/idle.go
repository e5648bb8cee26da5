package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// Goals of an idle pod: peak memory since the start, by the number of VIPs.
var idleGoals = map[string]map[int]string{
	"lb":               {1: "max ≤ 25", 10_000: "max ≤ 40"},
	"frontend":         {1: "max ≤ 30", 10_000: "max ≤ 50"},
	"BIRD of frontend": {},
}

const (
	idleCPUGoal = "max ≤ 0.2"
	// podCPUGoal is the goal for all three processes together.
	podCPUGoal = "max ≤ 0.5"
	// idleStarts is the number of measurements of the peak memory: it differs from start to start.
	idleStarts = 5
)

// usage is the processor time and peak memory of a process since its start.
type usage struct {
	cpu  time.Duration
	peak float64 // resident memory in MiB
}

// usageOf reads the usage of a process.
func usageOf(pid int) (usage, error) {
	cpu, err := cpuTime(pid)
	if err != nil {
		return usage{}, err
	}
	path := fmt.Sprintf("/proc/%d/status", pid)
	status, err := os.ReadFile(path)
	if err != nil {
		return usage{}, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	peak, err := peakMemory(string(status))
	if err != nil {
		return usage{}, fmt.Errorf("%s: %w", path, err)
	}
	return usage{cpu: cpu, peak: peak}, nil
}

// cpuTime reads the clock from which utime and stime of /proc/PID/stat derive. Both count in
// hundredths of a second, too coarse for a short measurement.
func cpuTime(pid int) (time.Duration, error) {
	const schedulerClock = 2 // CPUCLOCK_SCHED; encoded as by clock_getcpuclockid(3)
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedulerClock), &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// peakMemory finds VmHWM in /proc/PID/status, in MiB.
func peakMemory(status string) (float64, error) {
	for line := range strings.Lines(status) {
		words := strings.Fields(line)
		if len(words) == 3 && words[0] == "VmHWM:" && words[2] == "kB" {
			kib, err := strconv.ParseUint(words[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("line %q: %w", line, err)
			}
			return float64(kib) / 1024, nil
		}
	}
	return 0, errors.New("no line VmHWM in kB")
}

// measureIdle is row 12.
func measureIdle(ctx context.Context, s *session) error {
	peaks := map[string]*Measurement{}
	var names []string // in the order of the table
	for start := range s.repeats(idleStarts, 1) {
		err := onIdlePods(ctx, s, func(all []*watchedProcess) error {
			if start == 0 {
				if err := measureIdleShares(ctx, s, all); err != nil {
					return err
				}
			}
			for _, w := range all {
				u, err := usageOf(w.pid)
				if err != nil {
					return err
				}
				key := fmt.Sprintf("%s %d", w.name, w.n)
				if peaks[key] == nil {
					names = append(names, key)
					peaks[key] = &Measurement{
						Row: 12, What: w.name + ": peak resident memory", Method: vipgate, N: w.n, Unit: "MiB",
						Goal: idleGoals[w.name][w.n],
					}
				}
				peaks[key].Samples = append(peaks[key].Samples, u.peak)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, name := range names {
		s.record(*peaks[name])
	}
	return nil
}

// onIdlePods starts a pod for each number of VIPs, each on a separate fixture, and calls a
// function with their processes once they are idle.
func onIdlePods(ctx context.Context, s *session, do func(all []*watchedProcess) error) (err error) {
	var all []*watchedProcess
	for _, n := range s.sizes([]int{1, 10_000}, []int{1, 1000}) {
		var fx *fixture
		if fx, err = newFixture(ctx, s, n, oneFamily...); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, fx.close()) }()
		// Targets are checked as often as by default.
		usual := strings.NewReplacer("interval: 100ms", "interval: 1s", "timeout: 100ms", "timeout: 500ms")
		if err := errors.Join(fx.pod.WriteTrench(usual.Replace(fx.trench())), fx.startTarget()); err != nil {
			return err
		}
		if _, err := fx.startPod(); err != nil {
			return err
		}
		bird, err := fx.birdPID()
		if err != nil {
			return err
		}
		all = append(all,
			&watchedProcess{name: "lb", n: n, pid: fx.pod.LB.PID()},
			&watchedProcess{name: "frontend", n: n, pid: fx.pod.Frontend.PID()},
			&watchedProcess{name: "BIRD of frontend", n: n, pid: bird})
	}
	// The start is complete after a while: the frontend polls BIRD at short intervals for up to 5
	// s.
	if err := backoff.Sleep(ctx, s.lasts(10*time.Second, 200*time.Millisecond)); err != nil {
		return err
	}
	return do(all)
}

// measureIdleShares records the processor time of idle pods, which are idle at the same time.
func measureIdleShares(ctx context.Context, s *session, all []*watchedProcess) error {
	var err error
	for _, w := range all {
		if w.before, err = usageOf(w.pid); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := backoff.Sleep(ctx, s.lasts(time.Minute, 500*time.Millisecond)); err != nil {
		return err
	}
	together := map[int]float64{}
	for i, w := range all {
		after, err := usageOf(w.pid)
		if err != nil {
			return fmt.Errorf("%s with %d VIPs did not live through idle time: %w", w.name, w.n, err)
		}
		share := 100 * float64(after.cpu-w.before.cpu) / float64(time.Since(began))
		together[w.n] += share
		m := Measurement{
			Row: 12, What: w.name + ", idle: share of one core", Method: vipgate, N: w.n, Unit: "%",
			Goal: idleCPUGoal, Samples: []float64{share},
		}
		s.record(m)
		if i == len(all)-1 || all[i+1].n != w.n {
			m.What, m.Goal = "lb + frontend + BIRD, idle: share of one core", podCPUGoal
			m.Samples = []float64{together[w.n]}
			s.record(m)
		}
	}
	return nil
}

type watchedProcess struct {
	name   string
	n, pid int
	before usage
}

// birdPID returns the process ID of the frontend's BIRD: the only process in the pod except lb
// and frontend.
func (fx *fixture) birdPID() (int, error) {
	pids, err := fx.Pod.Processes()
	if err != nil {
		return 0, err
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == fx.pod.LB.PID() || pid == fx.pod.Frontend.PID() })
	if len(pids) != 1 {
		return 0, fmt.Errorf("processes in the pod beside lb and frontend: %v, want one BIRD", pids)
	}
	return pids[0], nil
}
