package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// sizeVariable has the numbers of VIPs, streams and targets of [TestPodAtSize], how long the trench
// file is edited, and the lease: 32768 500 1000 10m 1s in make proof, with the product's lease.
// Without it the pod is small, and a machine that stalls misses no lease.
const sizeVariable = "VIPGATE_TEST_SIZE"

// bigPodTimeout bounds each wait for a pod of that size.
const bigPodTimeout = 5 * time.Minute

// podSize is the value of [sizeVariable].
type podSize struct {
	vips, streams, targets int
	edited, lease          time.Duration
	// loaded is set if the variable is: the machine must reach the rates.
	loaded bool
}

func sizeOf(t *testing.T) (size podSize) {
	t.Helper()
	text := os.Getenv(sizeVariable)
	size.loaded = text != ""
	var edited, lease string
	var errs [3]error
	_, errs[0] = fmt.Sscan(cmp.Or(text, "2000 50 100 20s 1m"), &size.vips, &size.streams,
		&size.targets, &edited, &lease)
	size.edited, errs[1] = time.ParseDuration(edited)
	size.lease, errs[2] = time.ParseDuration(lease)
	if size.vips < 2*reserved || size.streams <= editedStreams || size.targets < size.streams {
		errs[0] = errors.Join(errs[0], errors.New("too few"))
	}
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatalf("%s=%q, want VIPs, streams, targets and two times, such as 2000 50 100 20s 1m: %v",
			sizeVariable, text, err)
	}
	return size
}

// In a pod with many VIPs, streams and targets, while the trench file is edited ten times a second
// and another process changes the ruleset twenty times a second, no reply leaves by the main table,
// no lease is missed, and no VIP is withdrawn.
func TestPodAtSize(t *testing.T) {
	t.Parallel()
	size := sizeOf(t)
	f := newBigPod(t, size)
	ctx, start := t.Context(), time.Now()
	f.must(f.pod.StartLB("--dataplane=nftables", "--lease="+size.lease.String()))
	f.must(f.pod.StartFrontend(fmt.Sprintf("--lb-bgp-hold-time=%v", 3*size.lease)))
	_, err := f.receiver.WaitCount(harness.Context(t, bigPodTimeout), f.permanent+visitors)
	f.must(err)
	t.Logf("%d VIPs of %d streams with %d targets at the gateway after %v", f.permanent+visitors,
		size.streams, size.targets+visitors, time.Since(start).Round(time.Millisecond))
	generator, err := load.Start(ctx, f.traffic())
	f.must(err)
	defer generator.Stop(ctx)
	begin := harness.Context(t, bigPodTimeout)
	f.must(errors.Join(generator.WaitFlows(begin), generator.WaitAnswered(begin, 10)))

	mark, before := f.receiver.Mark(), f.leases()
	busy, end := context.WithTimeout(ctx, size.edited)
	defer end()
	stopStalls := harness.Run(t, f.watchStalls)
	stopWriter := f.Pod.Background(t, func(context.Context) error { return f.writeRuleset(busy) })
	stopObserver := f.Pod.Background(t, f.observe)
	f.must(paced(busy, time.Second/editRate, f.edit))
	stopWriter()
	f.await(500*time.Millisecond, f.converged)
	stopObserver()
	stopStalls()

	f.wantBusy(mark)
	sent := f.counter("gateways")
	if leaked := f.counter("main"); leaked > 0 || sent == 0 {
		t.Errorf("%d replies left by the main table, and %d by the gateways", leaked, sent)
	}
	if missed := f.missed(before); len(missed) > 0 {
		t.Errorf("leases were missed, or sessions and processes restarted:\n%s\nbefore:\n%s",
			strings.Join(missed, ""), strings.Join(before, ""))
	}
	if lost := f.lost(mark); len(lost) > 0 {
		t.Errorf("%d times a VIP was withdrawn or de-preferred, first %+v", len(lost), lost[0])
	}
	result := generator.Now()
	t.Logf("%d replies left by the gateways; this process stalled %d times, for %v at most\n%s",
		sent, len(f.stalls), f.longestStall, load.Table(load.Row{Result: result}))
	harness.Check(t, result.Lost())
	f.wantDetection(mark, before)
}

// wantBusy checks that another process changed the ruleset, and that the trench file was edited, as
// often as intended, and that the edits took effect.
func (f *bigPod) wantBusy(mark int) {
	f.t.Helper()
	// A machine that stalls at the end leaves out the last ones, and one that is starved in a run of
	// all tests most of them.
	due := int(f.size.edited.Seconds() * 0.9)
	if !f.size.loaded {
		due = 1
	}
	if n := int(f.written.Load()); n < due*writeRate {
		f.t.Errorf("the other process changed the ruleset %d times in %v", n, f.size.edited)
	}
	f.noteReceived(mark)
	total := 0
	for kind, name := range editNames {
		edits, seen := f.edited(editKind(kind))-f.initial(editKind(kind)), f.seen(editKind(kind))
		total += edits
		f.t.Logf("%s: %d edits, %d seen in effect", name, edits, seen)
		if seen < edits/leastEffects {
			f.t.Errorf("%s: %d of %d edits were seen in effect", name, seen, edits)
		}
	}
	if total < due*editRate {
		f.t.Errorf("the trench file was edited %d times in %v", total, f.size.edited)
	}
}

// wantDetection checks that the test detects a reply that leaves by the main table, a missed lease,
// and a lost VIP.
func (f *bigPod) wantDetection(mark int, before []string) {
	f.t.Helper()
	f.await(10*time.Millisecond, func() error {
		err := f.removeMarks()
		if err == nil && f.counter("main") == 0 {
			err = errors.New("no reply without a mark was counted")
		}
		return err
	})
	f.must(f.pod.LB.Kill())
	f.await(500*time.Millisecond, func() error {
		if lost := len(f.lost(mark)); lost < f.permanent || slices.Equal(before, f.leases()) {
			return fmt.Errorf("after the end of lb %d VIPs are lost, and leases are\n%s", lost,
				strings.Join(before, ""))
		}
		return nil
	})
}

// await waits until condition returns nil.
func (f *bigPod) await(interval time.Duration, condition func() error) {
	f.t.Helper()
	f.must(lab.Eventually(harness.Context(f.t, bigPodTimeout), interval, condition))
}

// leaseCounters match the frontend's counters of decisions without a lease, sessions and restarts.
var leaseCounters = regexp.MustCompile(`(?m)^vipgate_frontend_(` +
	`vip_transitions_total\{.*reason="lb_(stale|lost)".*\}|` +
	`lb_stream_reconnects_total|announcer_sessions_total|bird_restarts_total) .*\n`)

// leases returns these counters, and the log lines about ends of leases.
func (f *bigPod) leases() []string {
	f.t.Helper()
	lines := leaseCounters.FindAllString(f.get(lab.FrontendMetrics, "/metrics"), -1)
	for line := range strings.Lines(f.pod.Frontend.Output()) {
		if strings.Contains(line, "load balancer readiness went from live") {
			lines = append(lines, line)
		}
	}
	return lines
}

// missed returns what leases has in addition. If this process did not run either, counters do not
// count, nor do log lines at that time.
func (f *bigPod) missed(before []string) (missed []string) {
	f.t.Helper()
	for _, line := range f.leases() {
		stalled := len(f.stalls) > 0
		stamp, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		if at, err := time.Parse(time.RFC3339Nano, stamp); err == nil {
			from, to := at.Add(-f.size.lease), at.Add(f.size.lease)
			stalled = slices.ContainsFunc(f.stalls, func(end time.Time) bool {
				return end.After(from) && end.Before(to)
			})
		}
		if !stalled && !slices.Contains(before, line) {
			missed = append(missed, line)
		}
	}
	return missed
}

// lost returns the updates since a mark that withdrew or de-preferred a VIP of the trench file.
func (f *bigPod) lost(mark int) (lost []lab.PrefixUpdate) {
	for _, update := range f.receiver.Since(mark) {
		if !update.Withdrawn && !update.Attributes.GracefulShutdown() {
			continue
		}
		if left, has := f.left[update.Prefix]; !has || update.At.Before(left) {
			lost = append(lost, update)
		}
	}
	return lost
}

// noteReceived notes the effects of edits that the gateway received since a mark.
func (f *bigPod) noteReceived(mark int) {
	joined := map[netip.Prefix]int{}
	for n := range f.edited(vipJoins) {
		joined[f.visitor(n)] = n + 1
	}
	for _, update := range f.receiver.Since(mark) {
		edit := joined[update.Prefix]
		switch {
		case update.Prefix == policyVIP() && !update.Withdrawn:
			f.note(policyEdit, int(update.Attributes.MED)-1)
		case edit > 0 && update.Withdrawn:
			f.note(vipLeaves, edit)
		case edit > 0 && !update.Attributes.GracefulShutdown():
			f.note(vipJoins, edit)
		}
	}
}

// converged returns an error unless the gateway has exactly the VIPs of the file, and the last edit
// of each kind is in effect.
func (f *bigPod) converged() error {
	table := f.receiver.Table()
	left, joined := f.edited(vipLeaves), f.edited(vipJoins)
	if len(table) != f.permanent+joined-left {
		return fmt.Errorf("the gateway has %d VIPs, want %d", len(table), f.permanent+joined-left)
	}
	for n := left; n < joined; n++ {
		if table[f.visitor(n)] == nil {
			return fmt.Errorf("the gateway lacks %s", f.visitor(n))
		}
	}
	if med := table[policyVIP()].MED; int(med)-1 != f.edited(policyEdit) {
		return fmt.Errorf("the MED is %d after %d edits of the policy", med, f.edited(policyEdit))
	}
	for _, kind := range []editKind{targetJoins, targetLeaves, streamEdit, checkEdit} {
		if last := f.edited(kind); !f.noted(kind, last) {
			return fmt.Errorf("%s: edit %d is not in effect", editNames[kind], last)
		}
	}
	return nil
}
