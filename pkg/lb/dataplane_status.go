package lb

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// slotsTimeout bounds how long a status waits for what is read from the kernel.
	slotsTimeout = time.Second
	// reconcileTimeout bounds a hold or a repair on demand; a client waits a little longer.
	reconcileTimeout = 30 * time.Second
)

// Reconcile implements the LBService.
func (a *admin) Reconcile(ctx context.Context, _ *lbv1.ReconcileRequest) (*lbv1.ReconcileResponse, error) {
	repaired, err := a.repair(ctx, (*dataplane.Plane).Reconcile)
	return &lbv1.ReconcileResponse{Mended: repaired}, err
}

// Hold implements the LBService.
func (a *admin) Hold(ctx context.Context, r *lbv1.HoldRequest) (*lbv1.HoldResponse, error) {
	if err := a.checkStream(r.GetStream()); err != nil {
		return nil, err
	}
	d := r.GetDuration().AsDuration()
	if r.GetDuration() != nil && d <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "the duration %v is not positive", d)
	}
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	until, err := a.process.plane.Hold(ctx, r.GetStream(), d)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	answer := &lbv1.HoldResponse{}
	if !until.IsZero() {
		answer.Until = timestamppb.New(until)
	}
	return answer, nil
}

// Resume implements the LBService.
func (a *admin) Resume(ctx context.Context, r *lbv1.ResumeRequest) (*lbv1.ResumeResponse, error) {
	repaired, err := a.repair(ctx, func(p *dataplane.Plane, ctx context.Context) ([]dataplane.Drift, error) {
		return p.Resume(ctx, r.GetStream())
	})
	return &lbv1.ResumeResponse{Repaired: repaired}, err
}

// checkStream refuses a data plane or stream that does not exist; "" is all streams.
func (a *admin) checkStream(name string) error {
	if a.process.plane == nil {
		return status.Error(codes.FailedPrecondition, "there is no data plane: this lb runs with --dataplane=none")
	}
	if name == "" || slices.ContainsFunc(a.process.config.Value().Load().Config.Streams, func(s trench.Stream) bool { return s.Name == name }) {
		return nil
	}
	return status.Errorf(codes.NotFound, "the trench file has no stream %s", name)
}

func (a *admin) repair(ctx context.Context, do func(*dataplane.Plane, context.Context) ([]dataplane.Drift, error)) (repaired []*lbv1.DataPlaneDrift, err error) {
	if err := a.checkStream(""); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	drift, err := do(a.process.plane, ctx)
	for _, d := range drift {
		repaired = append(repaired, driftProto(d))
	}
	if err != nil {
		// Not Unavailable, by which clients know that the process does not answer.
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return repaired, nil
}

// dataPlaneRepaired notes what the data plane repaired. It does not block.
func (p *process) dataPlaneRepaired(list []dataplane.Repaired) {
	var all []event
	for _, r := range list {
		e := event{Object: r.Object, What: driftRepaired, Detail: r.Detail, Stream: r.Stream, Target: r.Target}
		if r.Contested {
			e.What, e.Detail = driftContested, "another process keeps changing it: "+r.Detail
		}
		all = append(all, e)
	}
	for _, e := range summed(all) {
		p.events.add(e)
	}
}

// holdWords names what is held and until when.
func holdWords(stream string, until time.Time) (object, end string) {
	object, end = "all streams", "until lb resume"
	if stream != "" {
		object = "stream " + stream
	}
	if !until.IsZero() {
		end = "until " + until.UTC().Format(time.RFC3339)
	}
	return object, end
}

func driftProto(d dataplane.Drift) *lbv1.DataPlaneDrift {
	return &lbv1.DataPlaneDrift{Object: d.Object, Stream: d.Stream, Target: d.Target, Detail: d.Detail, Since: timestamppb.New(d.Since)}
}

// dataPlaneStatus is what `lb status` shows of the data plane; nil without one.
func (p *process) dataPlaneStatus(ctx context.Context) *lbv1.DataPlaneStatus {
	if p.plane == nil {
		return nil
	}
	state := p.plane.State().Load()
	s := &lbv1.DataPlaneStatus{
		Mode: "nftables", Conntrack: !p.DataPlane.Stateless, Error: text(state.Err), Failures: uint32(state.Failures), AppliedRevision: state.Revision,
		Repairs: state.Repairs,
	}
	for _, stream := range slices.Sorted(maps.Keys(state.Held)) {
		h := &lbv1.DataPlaneHold{Stream: stream}
		if until := state.Held[stream]; !until.IsZero() {
			h.Until = timestamppb.New(until)
		}
		s.Holds = append(s.Holds, h)
	}
	if shown := p.loop.plane.shown.Load(); shown != nil {
		s.HeldBack = shown.held
		if shown.desired != nil {
			s.WantedRevision = shown.desired.Revision
		}
	}
	for _, x := range state.Problems {
		problem := &lbv1.DataPlaneProblem{Object: x.Object, Detail: x.Detail, Remedy: x.Remedy}
		for _, v := range x.VIPs {
			problem.Vips = append(problem.Vips, v.String())
		}
		s.Problems = append(s.Problems, problem)
	}
	for _, d := range state.Drift {
		s.Drift = append(s.Drift, driftProto(d))
	}
	ctx, cancel := context.WithTimeout(ctx, slotsTimeout)
	defer cancel()
	slots, err := p.plane.Targets(ctx)
	s.Unread = text(err)
	s.Streams = p.dataPlaneStreams(state, slots)
	return s
}

// dataPlaneStreams are the streams of the trench file, in its order, and then those
// that are only in the kernel.
func (p *process) dataPlaneStreams(state dataplane.State, slots []dataplane.TargetView) []*lbv1.DataPlaneStream {
	var streams []*lbv1.DataPlaneStream
	byName := map[string]*lbv1.DataPlaneStream{}
	add := func(name string) *lbv1.DataPlaneStream {
		s, known := byName[name]
		if !known {
			s = &lbv1.DataPlaneStream{Name: name}
			if st := state.Streams[name]; st != nil {
				s.ProblemIpv4, s.ProblemIpv6 = st.Problem[vip.IPv4], st.Problem[vip.IPv6]
			}
			byName[name] = s
			streams = append(streams, s)
		}
		return s
	}
	for _, c := range p.config.Value().Load().Config.Streams {
		s := add(c.Name)
		s.Size, s.Seed = c.Maglev.Size, c.Maglev.Seed
	}
	for _, x := range slots {
		t := &lbv1.DataPlaneTarget{
			Name: x.Target, Number: x.FWMark, State: x.State, Packets: x.Packets, Bytes: x.Bytes,
			EntriesIpv4: uint32(x.Entries[vip.IPv4]), EntriesIpv6: uint32(x.Entries[vip.IPv6]),
		}
		for _, ip := range x.IPs {
			t.Addresses = append(t.Addresses, ip.String())
		}
		if !x.DrainEnd.IsZero() {
			t.DrainEnd = timestamppb.New(x.DrainEnd)
		}
		s := add(x.Stream)
		s.Targets = append(s.Targets, t)
	}
	for _, name := range state.VIPs {
		add(name).Vips++
	}
	return streams
}

// dataPlaneProblem says what is wrong with the data plane, "" if nothing is. Drift is no
// problem: it is repaired, or held.
func dataPlaneProblem(s dataplane.State) string {
	var problems []string
	if s.Err != nil {
		problems = append(problems, s.Err.Error())
	}
	if n := len(s.Problems); n > 0 {
		words := fmt.Sprintf("%s: %s", s.Problems[0].Object, s.Problems[0].Detail)
		if n > 1 {
			words += fmt.Sprintf(" (and %d more)", n-1)
		}
		problems = append(problems, words)
	}
	return strings.Join(problems, "; ")
}

// dataPlaneMetrics are the targets in the data plane at the moment of a scrape.
func (p *process) dataPlaneMetrics() metrics.DataPlane {
	state := p.plane.State().Load()
	m := metrics.DataPlane{
		Targets:  map[string]int{"serving": 0, "pending": 0, "draining": 0, "down": 0, "unknown": 0},
		Drift:    len(state.Drift),
		Problems: len(state.Problems),
		Held:     len(state.Held),
		Failures: p.observer.failures.Load(),
		Repairs:  state.Repairs,
	}
	shown := p.loop.plane.shown.Load()
	if shown == nil || shown.desired == nil {
		return m
	}
	for name, s := range shown.desired.Streams {
		for i := range s.Targets {
			t := &s.Targets[i]
			for _, ip := range t.IPs {
				f := vip.FamilyOf(ip)
				m.Targets[roleWord(t.Roles[f], isServing(state, name, f, t.Name))]++
			}
		}
	}
	return m
}

func isServing(s dataplane.State, stream string, f vip.Family, target string) bool {
	st := s.Streams[stream]
	if st == nil {
		return false
	}
	_, ok := st.Serving[f][target]
	return ok
}

func roleWord(r dataplane.Role, serves bool) string {
	switch {
	case r == dataplane.Serving && serves:
		return "serving"
	case r == dataplane.Serving:
		return "pending"
	case r == dataplane.Draining:
		return "draining"
	case r == dataplane.Down:
		return "down"
	}
	return "unknown"
}

// lookAtDataPlane notes what changed in the data plane. The data plane itself logs it.
func (o *observer) lookAtDataPlane(s dataplane.State) {
	p := o.process
	problem := dataPlaneProblem(s)
	select {
	case <-p.plane.Ready():
	default:
		if problem == "" {
			problem = "the kernel has not been read yet"
		}
	}
	p.health.Set(DataPlaneCondition, problem == "", problem)
	var held []string
	for _, stream := range slices.Sorted(maps.Keys(s.Held)) {
		object, end := holdWords(stream, s.Held[stream])
		held = append(held, object+" "+end)
	}
	p.health.Set(DataPlaneHoldCondition, len(held) == 0, "drift is not repaired: "+strings.Join(held, ", "))

	was := o.dataPlane
	o.dataPlane = s
	// Failures counts from zero after each success.
	if s.Failures > was.Failures {
		o.failures.Add(uint64(s.Failures - was.Failures))
	} else if s.Failures < was.Failures {
		o.failures.Add(uint64(s.Failures))
	}
	for _, e := range dataPlaneEvents(was, s) {
		p.events.add(e)
	}
}

// dataPlaneEvents are what happened between two states.
func dataPlaneEvents(was, is dataplane.State) []event {
	var all []event
	switch {
	case is.Err != nil && was.Err == nil:
		all = append(all, event{Object: "data plane", What: changesBlocked, Detail: is.Err.Error()})
	case is.Err == nil && was.Err != nil:
		all = append(all, event{Object: "data plane", What: problemSolved, Detail: was.Err.Error()})
	}
	for stream, until := range is.Held {
		if before, known := was.Held[stream]; !known || !before.Equal(until) {
			object, end := holdWords(stream, until)
			all = append(all, event{Object: object, What: holdBegun, Detail: end, Stream: stream})
		}
	}
	for stream, until := range was.Held {
		if _, held := is.Held[stream]; held {
			continue
		}
		object, _ := holdWords(stream, until)
		detail := "by an operator"
		if !until.IsZero() && !time.Now().Before(until) {
			detail = "the hold expired"
		}
		all = append(all, event{Object: object, What: holdEnded, Detail: detail, Stream: stream})
	}
	type object struct{ object, stream, target string }
	known := map[object]bool{}
	for _, d := range was.Drift {
		known[object{d.Object, d.Stream, d.Target}] = true
	}
	_, everything := is.Held[""]
	for _, d := range is.Drift {
		// Drift that is not held is repaired, and reported then.
		if _, held := is.Held[d.Stream]; (held || everything) && !known[object{d.Object, d.Stream, d.Target}] {
			all = append(all, event{Object: d.Object, What: driftSeen, Detail: d.Detail, Stream: d.Stream, Target: d.Target})
		}
	}
	type problem struct{ object, detail string }
	problems := map[problem]struct{}{}
	for _, x := range was.Problems {
		problems[problem{x.Object, x.Detail}] = struct{}{}
	}
	for _, x := range is.Problems {
		key := problem{x.Object, x.Detail}
		if _, known := problems[key]; !known {
			all = append(all, event{Object: x.Object, What: problemSeen, Detail: x.Detail})
		}
		delete(problems, key)
	}
	for _, x := range was.Problems {
		if _, over := problems[problem{x.Object, x.Detail}]; over {
			all = append(all, event{Object: x.Object, What: problemSolved, Detail: x.Detail})
		}
	}
	return summed(all)
}

// maxEventsAtOnce is how many events one state of the data plane makes: who deletes a
// table with thousands of targets must not push out all that happened before.
const maxEventsAtOnce = 100

// summed replaces the last of too many events by one of the kind of the first that is
// left out.
func summed(all []event) []event {
	more := len(all) - maxEventsAtOnce + 1
	if more < 2 {
		return all
	}
	first := all[maxEventsAtOnce-1]
	return append(all[:maxEventsAtOnce-1], event{Object: "data plane", What: first.What, Detail: fmt.Sprintf("and %d more at once: lb status lists what there is", more)})
}
