package readiness

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Report sums up what the frontend says that it does. What it says of each VIP
// is read with Server.Reported and Server.AllReported.
//
// The reports that count are those of the newest open watch of a frontend that
// has told everything once, so that a move to another connection leaves no hole
// and a watch that only looks silences nobody.
type Report struct {
	// WatchID is the watch that the report belongs to; empty before the first report.
	WatchID string
	Peer    spiffeid.ID
	// Connected says that the frontend can still change the report. What a
	// frontend said last stays readable after it is gone.
	Connected bool
	// Complete says that the frontend has told everything once on this watch:
	// from then on a VIP that is not reported is not advertised.
	Complete bool
	// Applied is the position that the frontend has applied.
	Applied Position
	// Families is the external connectivity of each configured family: true
	// while a gateway session is up. It must not be changed.
	Families map[vip.Family]bool
	// Advertised and Withdrawn count the reported VIPs: those that gateways are
	// told to use, also de-preferred ones, and the others.
	Advertised, Withdrawn int
	// At is when the newest message came, or when Connected became false.
	At time.Time
}

// reported is what the reports of one watch said.
type reported struct {
	summary Report
	vips    map[vip.VIP]VIPReport
	streams int // open report streams that name the watch
}

// Report returns the summary of the newest report. It is replaced at each
// message, at a cost that does not depend on the number of VIPs.
func (s *Server) Report() *latest.Value[Report] { return s.report }

// Reported returns what the frontend says that it does with a VIP.
func (s *Server) Reported(v vip.VIP) (VIPReport, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.counted == nil {
		return VIPReport{}, false
	}
	r, ok := s.counted.reported.vips[v]
	return r, ok
}

// AllReported returns what the frontend says that it does with each VIP. It
// costs time of the order of the number of VIPs.
func (s *Server) AllReported() map[vip.VIP]VIPReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.counted == nil {
		return nil
	}
	return maps.Clone(s.counted.reported.vips)
}

// ReportAdvertisement implements the ReadinessService.
func (s *Server) ReportAdvertisement(stream grpc.ClientStreamingServer[readinessv1.ReportAdvertisementRequest, readinessv1.ReportAdvertisementResponse]) error {
	ctx := stream.Context()
	id, _, err := s.caller(ctx, "ReportAdvertisement", RoleFrontend)
	if err != nil {
		return err
	}
	done, err := s.begin(id)
	if err != nil {
		return err
	}
	// EndWatches cannot wake Recv, so another goroutine sits in it. When this
	// handler returns, the stream ends, hence Recv, hence the goroutine; it
	// counts as the handler, so that EndWatches waits for it.
	ended := make(chan error, 1)
	go func() {
		defer done()
		ended <- s.receive(id, stream.Recv)
	}()
	select {
	case err = <-ended:
	case <-s.stop:
		return errStopping
	}
	if err == nil {
		return stream.SendAndClose(&readinessv1.ReportAdvertisementResponse{})
	}
	if ctx.Err() == nil {
		s.log.Warn("ended a report stream", "peer", id.String(), "reason", err)
	}
	return err
}

// receive takes in reports until the stream ends.
func (s *Server) receive(id spiffeid.ID, recv func() (*readinessv1.ReportAdvertisementRequest, error)) error {
	var target *watch // the open watch that the stream named first
	defer func() {
		if target != nil {
			s.reporterGone(target)
		}
	}()
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		d, err := reportFromProto(m)
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		w, err := s.take(id, m.GetWatchId(), target, d)
		if err != nil {
			return err
		}
		if w != nil {
			target = w
			continue
		}
		// A watch that has just ended, or never was: its reports say nothing
		// about now.
		if n, ok := s.quiet.Allow(time.Now()); ok {
			s.log.Info("ignored a report that names no open watch of its peer", "peer", id.String(), "watch_id", cleanDetail(m.GetWatchId()), "lines_left_out", n)
		}
	}
}

// take takes in one report and returns the watch that it belongs to; nil means
// that it was ignored. before is the watch that its stream named earlier.
func (s *Server) take(id spiffeid.ID, watchID string, before *watch, d heard) (*watch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.watches[watchID]
	if w == nil || w.peer != id || (before != nil && before != w) {
		return nil, nil
	}
	if before == nil {
		// A stream begins with everything, so what an earlier stream of the
		// same watch said is void.
		streams := 1
		if w.reported != nil {
			streams += w.reported.streams
		}
		w.reported = &reported{
			summary: Report{WatchID: w.id, Peer: w.peer, Connected: true},
			vips:    make(map[vip.VIP]VIPReport),
			streams: streams,
		}
	}
	if err := w.reported.apply(d); err != nil {
		return w, err
	}
	// A newer watch takes over once its report is whole.
	if c := s.counted; c == nil || c == w || !s.live(c) || (w.number > c.number && w.reported.summary.Complete) {
		if s.counted != w {
			s.log.Info("the reports of this watch count from now on", "watch_id", w.id, "peer", w.peer.String())
		}
		s.counted = w
		s.report.Set(w.reported.summary)
	}
	return w, nil
}

func (r *reported) apply(d heard) error {
	for v, now := range d.VIPs {
		old, known := r.vips[v]
		if known {
			r.count(old, -1)
		} else if len(r.vips) >= MaxVIPs {
			return status.Errorf(codes.ResourceExhausted, "more than %d VIPs are reported", MaxVIPs)
		}
		r.vips[v] = now
		r.count(now, 1)
	}
	if d.Families != nil {
		r.summary.Families = d.Families
	}
	if d.complete {
		r.summary.Applied, r.summary.Complete = d.Applied, true
	}
	r.summary.At = time.Now()
	return nil
}

func (r *reported) count(v VIPReport, by int) {
	if v.advertised() {
		r.summary.Advertised += by
	} else {
		r.summary.Withdrawn += by
	}
}

// reporterGone notes that a report stream of the watch ended.
func (s *Server) reporterGone(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.reported.streams--; w.reported.streams == 0 {
		s.recount()
	}
}

// recount finds the watch whose reports count after a watch or a report stream
// ended. When none is left, the last word stays, no longer Connected. The caller
// holds s.mu.
func (s *Server) recount() {
	if s.counted == nil || s.live(s.counted) {
		return
	}
	var newest *watch
	for _, w := range s.watches {
		if s.live(w) && (newest == nil || w.precedes(newest)) {
			newest = w
		}
	}
	if newest != nil {
		s.counted = newest
		s.report.Set(newest.reported.summary)
		return
	}
	if sum := &s.counted.reported.summary; sum.Connected {
		sum.Connected, sum.At = false, time.Now()
		s.report.Set(*sum)
	}
}

// precedes tells whether the reports of w rather count than those of o: whole
// ones first, then newer ones.
func (w *watch) precedes(o *watch) bool {
	if a, b := w.reported.summary.Complete, o.reported.summary.Complete; a != b {
		return a
	}
	return w.number > o.number
}

// live tells whether the watch is open and somebody reports for it.
func (s *Server) live(w *watch) bool {
	return s.watches[w.id] == w && w.reported != nil && w.reported.streams > 0
}

// heard is a report as it was received.
type heard struct {
	ReportDelta
	complete bool // it has a position, so nothing of it is missing
}

// reportFromProto reads a report.
func reportFromProto(m *readinessv1.ReportAdvertisementRequest) (heard, error) {
	d := heard{ReportDelta: ReportDelta{VIPs: make(map[vip.VIP]VIPReport, len(m.GetVips()))}}
	if n := len(m.GetVips()); n > MaxVIPsPerMessage {
		return d, fmt.Errorf("the report holds %d VIPs, more than %d", n, MaxVIPsPerMessage)
	}
	if p := m.GetApplied(); p != nil {
		if len(p.GetInstanceId()) > maxNameBytes {
			return d, fmt.Errorf("applied: the instance_id has %d bytes, more than %d", len(p.GetInstanceId()), maxNameBytes)
		}
		d.Applied, d.complete = Position{p.GetInstanceId(), p.GetRevision()}, true
	}
	if len(m.GetFamilies()) > 0 {
		d.Families = make(map[vip.Family]bool)
	}
	for _, f := range m.GetFamilies() {
		switch f.GetFamily() {
		case readinessv1.IpFamily_IP_FAMILY_IPV4:
			d.Families[vip.IPv4] = f.GetUp()
		case readinessv1.IpFamily_IP_FAMILY_IPV6:
			d.Families[vip.IPv6] = f.GetUp()
		default:
			return d, fmt.Errorf("families: unknown family %d", f.GetFamily())
		}
	}
	for _, a := range m.GetVips() {
		v, err := vip.Parse(a.GetVip())
		if err != nil {
			return d, err
		}
		if _, twice := d.VIPs[v]; twice {
			return d, fmt.Errorf("VIP %s is reported twice in one message", v)
		}
		r := VIPReport{Advertisement: a.GetAdvertisement(), Reason: a.GetReason(), Unconfirmed: a.GetUnconfirmed()}
		switch r.Advertisement {
		case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED, readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN:
		default:
			return d, fmt.Errorf("VIP %s has the unknown advertisement %d", v, r.Advertisement)
		}
		if _, known := readinessv1.AdvertisementReason_name[int32(r.Reason)]; !known {
			r.Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED
		}
		d.VIPs[v] = r
	}
	return d, nil
}

// Proto returns what the frontend does with v as a message.
func (r VIPReport) Proto(v vip.VIP) *readinessv1.VipAdvertisement {
	return &readinessv1.VipAdvertisement{Vip: v.String(), Advertisement: r.Advertisement, Reason: r.Reason, Unconfirmed: r.Unconfirmed}
}
