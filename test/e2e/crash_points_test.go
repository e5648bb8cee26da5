package e2e

import (
	"context"
	"errors"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// Issue 5: "Crash points: a fault hook in the test build kills the LB at each step between record, kernel and
// report; the end state is always the same." One target leaves and one comes while
// clients go on; the lb dies in the middle and is started again. What the kernel has at
// the end is what it has without a death, and of the target that stays nothing is lost.
func TestLBKilledAtAnyStepEndsTheSame(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	mortal := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	if err := lab.Build(ctx, root, mortal, "-tags=vipgate_faults"); err != nil {
		t.Fatal(err)
	}
	want := endOfChange(t, mortal, "")
	for _, step := range dataplane.FaultSteps() {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			if got := endOfChange(t, mortal, step); got != want {
				t.Errorf("killed after %q the kernel has\n%s\nwithout a death\n%s", step, got, want)
			}
		})
	}
}

// endOfChange tells what the kernel has after a change in which the lb dies at a step,
// unless that is "".
func endOfChange(t *testing.T, mortal, step string) string {
	t.Helper()
	w := newDataPlaneWorldOf(t, 3)
	w.start()
	g, err := w.Load(w.ctx, 100, 12, load.Config{})
	w.must(err)
	defer g.Stop(w.ctx)
	w.must(g.WaitFlows(w.ctx))
	w.must(g.WaitTargets(w.ctx, "target-1", "target-2"))

	w.must(w.pod.LB.Kill())
	if step != "" {
		w.startMortalLB(mortal, step)
	} else {
		w.must(w.pod.StartLB("--dataplane=nftables"))
	}
	w.must(w.WriteTrench(dataPlaneTrench(2, 3)))
	if step != "" {
		_, _ = w.pod.LB.Wait(w.ctx) // by a signal
		select {
		case <-w.pod.LB.Done():
		default:
			t.Fatalf("the lb was not killed after %q", step)
		}
		w.must(w.pod.StartLB("--dataplane=nftables"))
	}
	w.until("target-3  500", "status")
	w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
		out, err := w.lb("status")
		if err == nil && (!strings.Contains(out, "confirmed   everything that is wanted") || strings.Contains(out, "target-1 ")) {
			err = errors.New("target-1 is still there, or something is not confirmed")
		}
		return err
	}))
	w.must(g.WaitTargets(w.ctx, "target-2", "target-3"))
	result := g.Stop(w.ctx)
	if err := result.Lost("target-1"); err != nil {
		t.Error(err)
	}
	return w.plane()
}

// startMortalLB starts an lb that kills itself after a step.
func (w *dataPlaneWorld) startMortalLB(binaries, step string) {
	w.t.Helper()
	pod := *w.pod
	pod.Binaries = binaries
	args := append([]string{"env", "VIPGATE_FAULT=" + step}, pod.LBArgs("--dataplane=nftables")...)
	var err error
	w.pod.LB, err = w.Start(w.pod.Namespace(), "lb", args...)
	w.must(err)
}

// changing is what differs between two kernels that forward alike.
var changing = regexp.MustCompile(`packets \d+ bytes \d+|handle \d+`)

// plane is all that the data plane has in the kernel, in an order of its own.
func (w *dataPlaneWorld) plane() string {
	w.t.Helper()
	out, err := w.pod.Namespace().Run(w.ctx, "nft", "list", "table", "inet", dataplane.TableName)
	w.must(err)
	lines := strings.Split(changing.ReplaceAllString(out, "")+w.kernel(), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
