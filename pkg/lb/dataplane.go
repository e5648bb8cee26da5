package lb

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	readTimeout      = time.Second      // of a status
	reconcileTimeout = 30 * time.Second // of a hold or a repair on demand; a client waits a little longer
	kernelNotRead    = "the kernel has not been read yet"
	// maxEventsAtOnce bounds the events of one state: thousands would evict all earlier events.
	maxEventsAtOnce = 100
)

// Reconcile implements the LBService.
func (a *admin) Reconcile(ctx context.Context, _ *lbv1.ReconcileRequest) (*lbv1.Repairs, error) {
	r := &lbv1.Repairs{}
	return r, a.withPlane(ctx, "reconcile", "", func(ctx context.Context, p *dataplane.Plane) error {
		drift, err := p.Reconcile(ctx)
		r.Repaired = driftProto(drift)
		return err
	})
}

// Hold implements the LBService.
func (a *admin) Hold(ctx context.Context, request *lbv1.HoldRequest) (*lbv1.HoldResponse, error) {
	d := request.GetDuration().AsDuration()
	// Without a duration, the hold lasts until Resume.
	if request.GetDuration() != nil && d <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "the duration %v is not positive", d)
	}
	r := &lbv1.HoldResponse{}
	return r, a.withPlane(ctx, "hold", request.GetStream(), func(ctx context.Context, p *dataplane.Plane) error {
		until, err := p.Hold(ctx, request.GetStream(), d)
		r.Until = endpoint.Timestamp(until)
		return err
	})
}

// Resume implements the LBService.
func (a *admin) Resume(ctx context.Context, request *lbv1.ResumeRequest) (*lbv1.Repairs, error) {
	r := &lbv1.Repairs{}
	return r, a.withPlane(ctx, "resume", request.GetStream(), func(ctx context.Context, p *dataplane.Plane) error {
		drift, err := p.Resume(ctx, request.GetStream())
		r.Repaired = driftProto(drift)
		return err
	})
}

// withPlane passes an order for a stream to the data plane and records it; "" is all streams.
func (a *admin) withPlane(ctx context.Context, order, stream string, do func(context.Context, *dataplane.Plane) error,
) error {
	if a.process.plane == nil {
		return status.Error(codes.FailedPrecondition, "there is no data plane: this lb runs with --dataplane=none")
	}
	// A hold of a mistyped stream would protect nothing. A held one may have left the trench file.
	if order == "hold" && stream != "" {
		if _, known := a.process.stream(stream); !known {
			return status.Errorf(codes.NotFound, "the trench file has no stream %s", stream)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, reconcileTimeout)
	defer cancel()
	if err := do(ctx, a.process.plane); err != nil {
		// Not Unavailable: clients report that code as a process that does not answer.
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	caller := identity.Caller(ctx)
	a.process.Log.Info("operator changed the data plane", "order", order, "stream", stream, "by", caller)
	a.process.decisions.journal.Add(&adminv1.Event{
		Object: "data plane", To: order, Stream: stream, Detail: "ordered by an operator", By: caller,
	})
	return nil
}

func driftProto(drift []plan.Drift) (list []*lbv1.DataPlaneDrift) {
	for _, d := range drift {
		list = append(list, &lbv1.DataPlaneDrift{
			Object: d.Object, Stream: d.Stream, Target: d.Target, Detail: d.Detail, Since: timestamppb.New(d.Since),
		})
	}
	return list
}

// dataPlaneStatus returns the data plane section of `lb status`; nil without a data plane.
func (p *process) dataPlaneStatus(ctx context.Context) *lbv1.DataPlaneStatus {
	if p.loop.plane == nil {
		return nil
	}
	state, forwarding := p.loop.plane.State().Load(), p.loop.forwarding.Load()
	s := &lbv1.DataPlaneStatus{
		Mode: "local addresses on " + p.VIPInterface, Repairs: state.Repairs,
		Error: logs.Text(state.Err), Failures: uint32(state.Failures),
		AppliedRevision: state.Revision, WantedRevision: forwarding.Desired.Revision,
		HeldBack: forwarding.Held, Drift: driftProto(state.Drift),
	}
	for _, x := range state.Problems {
		s.Problems = append(s.Problems, &adminv1.Problem{
			Object: x.Object, Detail: x.Detail, Remedy: x.Remedy, Vips: vip.Texts(x.VIPs),
		})
	}
	if p.plane == nil {
		return s
	}
	s.Mode, s.Conntrack = "nftables", p.DataPlane.Conntrack.String()
	if p.DataPlane.FastPath != dataplane.FastPathOff {
		fast := p.plane.FastPath()
		s.FastPath = &lbv1.FastPathStatus{Reason: fast.Reason}
		for _, at := range fast.Interfaces {
			s.FastPath.Interfaces = append(s.FastPath.Interfaces, &lbv1.FastPathInterface{Name: at.Name, Reason: at.Reason})
		}
	}
	for _, stream := range slices.Sorted(maps.Keys(state.Held)) {
		s.Holds = append(s.Holds, &lbv1.DataPlaneHold{Stream: stream, Until: endpoint.Timestamp(state.Held[stream])})
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	// These read the kernel. If it does not respond in time, the rest of the status is valid.
	targets, err := p.plane.Targets(ctx)
	unmatched, unmatchedErr := p.plane.Unmatched(ctx)
	moved, movedErr := p.plane.Moved(ctx)
	s.Unread = logs.Text(cmp.Or(err, unmatchedErr, movedErr))
	s.Streams = p.dataPlaneStreams(state, targets, unmatched)
	for _, stream := range s.GetStreams() {
		stream.Earlier = append(stream.Earlier, earlierProto(moved.Generations[stream.GetName()].Earlier)...)
		stream.AsksAllTargets = moved.Everyone[stream.GetName()]
	}
	s.MovedFlows = &lbv1.MovedFlows{
		Asked: moved.Packets.Asked, Current: moved.Packets.Current, Decided: moved.Packets.Decided,
		Denied: moved.Packets.Denied, Full: moved.Packets.Full,
	}
	return s
}

// dataPlaneStreams returns the streams in force, then those that only the kernel has.
func (p *process) dataPlaneStreams(
	state plan.State, targets []dataplane.TargetView, unmatched map[string]uint64,
) []*lbv1.DataPlaneStream {
	var streams []*lbv1.DataPlaneStream
	byName := map[string]*lbv1.DataPlaneStream{}
	// The kernel may have targets and VIPs of a stream that left the file: add it on demand.
	stream := func(name string) *lbv1.DataPlaneStream {
		if s, known := byName[name]; known {
			return s
		}
		s := &lbv1.DataPlaneStream{Name: name}
		if st := state.Streams[name]; st != nil {
			s.ProblemIpv4, s.ProblemIpv6 = st.Problem[vip.IPv4], st.Problem[vip.IPv6]
		}
		byName[name], streams = s, append(streams, s)
		return s
	}
	// Streams in force come first, so that they keep their order.
	for _, c := range p.loop.inForce.Load().Streams {
		s := stream(c.Name)
		s.Size, s.Seed, s.UnmatchedPackets = c.Maglev.Size, c.Maglev.Seed, unmatched[c.Name]
		for _, generation := range c.Earlier {
			s.Earlier = append(s.Earlier, &lbv1.DataPlaneGeneration{
				TargetsIpv4: generation.Targets, TargetsIpv6: generation.Targets,
			})
		}
		for _, m := range c.Match {
			for _, protocol := range m.Protocols {
				for _, port := range m.Ports {
					s.Match = append(s.Match, fmt.Sprintf("%s/%d", protocol, port))
				}
			}
		}
	}
	for _, x := range targets {
		s := stream(x.Stream)
		s.Targets = append(s.Targets, &lbv1.DataPlaneTarget{
			Name: x.Name, Number: x.FWMark, State: x.State, Packets: x.Packets, Bytes: x.Bytes,
			EntriesIpv4: uint32(x.Entries[vip.IPv4]), EntriesIpv6: uint32(x.Entries[vip.IPv6]),
			Addresses: vip.Texts(x.Addresses()), DrainEnd: endpoint.Timestamp(x.DrainEnd),
		})
	}
	// state.VIPs maps each VIP in the kernel to its stream, whatever the file lists.
	for _, name := range state.VIPs {
		stream(name).Vips++
	}
	return streams
}

func earlierProto(generations []plan.Generation) (list []*lbv1.DataPlaneGeneration) {
	for _, generation := range generations {
		list = append(list, &lbv1.DataPlaneGeneration{
			TargetsIpv4: generation.Targets[vip.IPv4], TargetsIpv6: generation.Targets[vip.IPv6],
			Lasted: durationpb.New(time.Duration(generation.Seconds * float64(time.Second))),
			Until:  timestamppb.New(generation.Until),
		})
	}
	return list
}

// roles maps the role of a target to its state in the metrics until the kernel confirms it.
var roles = [...]string{plan.Unknown: "unknown", plan.Down: "down", plan.Draining: "draining", plan.Serving: "pending"}

// dataPlaneMetrics returns the targets in the data plane at the moment of a scrape.
func (p *process) dataPlaneMetrics() metrics.DataPlane {
	state := p.loop.plane.State().Load()
	m := metrics.DataPlane{
		Targets: map[string]int{"serving": 0}, Drift: len(state.Drift), Problems: len(state.Problems),
		Held: len(state.Held), Failures: state.TotalFailures, Repairs: state.Repairs,
	}
	if p.plane != nil && p.DataPlane.FastPath != dataplane.FastPathOff {
		m.FastPath = map[bool]int{true: 0, false: 0}
		for _, at := range p.plane.FastPath().Interfaces {
			m.FastPath[at.Reason == ""]++
		}
	}
	for _, role := range roles {
		// Without the zero, the series of a state would vanish with its last target.
		m.Targets[role] = 0
	}
	matches := false
	for name, s := range p.loop.forwarding.Load().Desired.Streams {
		matches = matches || s.Match != nil
		for _, t := range s.Targets {
			for _, ip := range t.IPs {
				f := vip.FamilyOf(ip)
				word := roles[t.Roles[f]]
				// A desired target counts as serving only once the confirmed kernel state contains it.
				if t.Roles[f] == plan.Serving && state.Serves(name, f, t.Name) {
					word = "serving"
				}
				m.Targets[word]++
			}
		}
	}
	if p.plane == nil {
		return m
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	// A counter that cannot be read is absent.
	if moved, err := p.plane.Moved(ctx); err == nil {
		m.Moved = map[string]uint64{
			"asked": moved.Packets.Asked, "current": moved.Packets.Current, "earlier": moved.Packets.Decided,
			"denied": moved.Packets.Denied, "full": moved.Packets.Full,
		}
	}
	// Only streams with a match count unmatched packets, so most scrapes need not read the kernel.
	if matches {
		m.Unmatched, _ = p.plane.Unmatched(ctx)
	}
	return m
}

// dataPlaneProblem returns the first problem of the data plane, or "". Drift, repaired, is none.
func dataPlaneProblem(s plan.State) string {
	if len(s.Problems) == 0 {
		return logs.Text(s.Err)
	}
	problem := s.Problems[0].Object + ": " + s.Problems[0].Detail + andMore(len(s.Problems)-1)
	if s.Err != nil {
		problem = s.Err.Error() + "; " + problem
	}
	return problem
}

// showDataPlane publishes changes of the data plane as health and events; its package logs them.
func (o *observer) showDataPlane(s plan.State) {
	p := o.process
	problem := dataPlaneProblem(s)
	// Before the first read of the kernel, State has neither problems nor an error.
	select {
	case <-p.loop.plane.Ready():
	default:
		problem = cmp.Or(problem, kernelNotRead)
	}
	p.health.Report(DataPlaneCondition, problem)
	var held []string
	for _, stream := range slices.Sorted(maps.Keys(s.Held)) {
		object, end := describeHold(stream, s.Held[stream])
		held = append(held, object+" "+end)
	}
	// A hold has its own condition: a forgotten hold must show while the data plane works.
	p.health.Set(DataPlaneHoldCondition, len(held) == 0, "drift is not repaired: "+strings.Join(held, ", "))
	p.decisions.journal.Add(dataPlaneEvents(o.dataPlane, s)...)
	o.dataPlane = s
}

// describeHold returns the held object and the end of its hold.
func describeHold(stream string, until time.Time) (object, end string) {
	object, end = "all streams", "until lb resume"
	if stream != "" {
		object = "stream " + stream
	}
	if !until.IsZero() {
		end = "until " + until.UTC().Format(time.RFC3339)
	}
	return object, end
}

// dataPlaneRepaired adds an event for each repair. It does not block.
func (p *process) dataPlaneRepaired(list []dataplane.Repaired) {
	var all []*adminv1.Event
	for _, r := range list {
		e := &adminv1.Event{Object: r.Object, To: "repaired", Detail: r.Detail, Stream: r.Stream, Target: r.Target}
		if r.Contested {
			e.To, e.Detail = "contested", "another process keeps changing it: "+r.Detail
		}
		all = append(all, e)
	}
	// A flushed ruleset yields one repair for each object.
	p.decisions.journal.Add(summed(all)...)
}

// dataPlaneEvents returns the events between two states.
func dataPlaneEvents(was, is plan.State) []*adminv1.Event {
	var all []*adminv1.Event
	switch {
	case is.Err != nil && was.Err == nil:
		all = append(all, &adminv1.Event{Object: "data plane", To: "blocked", Detail: is.Err.Error()})
	case is.Err == nil && was.Err != nil:
		all = append(all, &adminv1.Event{Object: "data plane", To: "solved", Detail: was.Err.Error()})
	}
	// A hold that is renewed with another end is an event, too.
	for stream, until := range is.Held {
		if before, known := was.Held[stream]; !known || !before.Equal(until) {
			object, end := describeHold(stream, until)
			all = append(all, &adminv1.Event{Object: object, To: "held", Detail: end, Stream: stream})
		}
	}
	for stream, until := range was.Held {
		if _, held := is.Held[stream]; !held {
			object, _ := describeHold(stream, until)
			// The state does not contain why a hold ended, so its end decides.
			detail := "by an operator"
			if !until.IsZero() && !time.Now().Before(until) {
				detail = "the hold expired"
			}
			all = append(all, &adminv1.Event{Object: object, To: "resumed", Detail: detail, Stream: stream})
		}
	}
	// The key "" is the hold of all streams.
	_, everything := is.Held[""]
	for _, d := range plan.Without(is.Drift, was.Drift, plan.Drift.Key) {
		// Drift without a hold is repaired; dataPlaneRepaired reports it.
		if _, held := is.Held[d.Stream]; held || everything {
			all = append(all, &adminv1.Event{
				Object: d.Object, To: "drift", Detail: d.Detail, Stream: d.Stream, Target: d.Target,
			})
		}
	}
	for _, x := range plan.Without(is.Problems, was.Problems, plan.Problem.Key) {
		all = append(all, &adminv1.Event{Object: x.Object, To: "problem", Detail: x.Detail})
	}
	for _, x := range plan.Without(was.Problems, is.Problems, plan.Problem.Key) {
		all = append(all, &adminv1.Event{Object: x.Object, To: "solved", Detail: x.Detail})
	}
	return summed(all)
}

// summed replaces the events beyond maxEventsAtOnce by a summary of the kind of their first.
func summed(all []*adminv1.Event) []*adminv1.Event {
	more := len(all) - maxEventsAtOnce + 1
	if more < 2 {
		return all
	}
	what, detail := all[maxEventsAtOnce-1].GetTo(), fmt.Sprintf("and %d more at once: lb status lists what there is", more)
	return append(all[:maxEventsAtOnce-1], &adminv1.Event{Object: "data plane", To: what, Detail: detail})
}
