package e2e

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/test/crash"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// A hook in bin/test/crash/lb kills the LB at each step between plan, kernel and report; the end
// state is always the same. During load one target leaves and one joins; the lb is killed in
// between and restarted. The final kernel state equals the state without a crash, and the
// remaining target loses no flow.
func TestLBKilledAtEachStep(t *testing.T) {
	t.Parallel()
	mortal := filepath.Join(binaries, "crash")
	want := endOfChange(t, mortal, "")
	for _, step := range crash.Steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			if got := endOfChange(t, mortal, step); got != want {
				t.Errorf("killed after %q the kernel has\n%s\nwithout a death\n%s", step, got, want)
			}
		})
	}
}

// endOfChange returns the kernel state after a change during which the lb is killed at step, or is
// not killed if step is "".
func endOfChange(t *testing.T, mortal, step string) string {
	t.Helper()
	f := newDataPlaneFixtureOf(t, 1, 3)
	f.start(longGrace)
	g, err := f.Load(f.ctx, 30, 12, load.Config{}) // four pods at a time
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(g.WaitFlows(f.ctx))
	f.must(g.WaitTargets(f.ctx, "target-1", "target-2"))

	f.must(f.pod.LB.Kill())
	if step != "" {
		f.startMortalLB(mortal, step)
	} else {
		f.must(f.pod.StartLB("--dataplane=nftables", longGrace))
	}
	f.must(f.WriteTrench(dataPlaneTrench(2, 3)))
	if step != "" {
		_, _ = f.pod.LB.Wait(f.ctx) // by a signal
		select {
		case <-f.pod.LB.Done():
		default:
			t.Fatalf("the lb was not killed after %q", step)
		}
		f.must(f.pod.StartLB("--dataplane=nftables", longGrace))
	}
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		out, err := f.lb("status")
		if err != nil {
			return err
		}
		// A status whose reader was too late has no targets.
		if !strings.Contains(out, "confirmed   desired state") || !strings.Contains(out, "target-3  500") ||
			strings.Contains(out, "target-1  500") {
			return fmt.Errorf("target-1 is still there, or something is not confirmed:\n%s", out)
		}
		return nil
	}))
	f.must(g.WaitTargets(f.ctx, "target-2", "target-3"))
	result := g.Stop(f.ctx)
	harness.Check(t, result.Lost("target-1"))
	return f.plane()
}

// startMortalLB starts an lb that kills itself after a step.
func (f *dataPlaneFixture) startMortalLB(binaries, step string) {
	f.t.Helper()
	pod := *f.pod
	pod.Binaries = binaries
	args := append([]string{"env", crash.Variable + "=" + step}, pod.LBArgs("--dataplane=nftables", longGrace)...)
	var err error
	f.pod.LB, err = f.Start(f.pod.Namespace(), "lb", args...)
	f.must(err)
}

// changing matches the text that differs between two kernels with equal forwarding state.
var changing = regexp.MustCompile(`packets \d+ bytes \d+|handle \d+`)

// plane returns the data plane's kernel state as sorted lines.
func (f *dataPlaneFixture) plane() string {
	f.t.Helper()
	out, err := f.pod.Namespace().Run(f.ctx, "nft", "list", "table", "inet", plan.TableName)
	f.must(err)
	lines := strings.Split(changing.ReplaceAllString(out, "")+f.kernel(), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
