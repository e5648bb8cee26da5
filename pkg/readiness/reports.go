package readiness

import (
	"errors"
	"io"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Report is the summary of the frontend's report. Server.Reported and Server.AllReported return the
// VIPs.
//
// The reporting watch is the newest open watch of a frontend that has sent a full report. A watch
// without reports does not replace it, so a move to another connection leaves no gap.
type Report struct {
	// WatchID is the reporting watch; empty before the first report.
	WatchID string
	// Connected reports whether a report stream is open. The last report remains readable afterwards.
	Connected bool
	// Complete reports whether a full report was received on this watch: an unreported VIP is not
	// advertised.
	Complete bool
	// Applied is the position that the frontend has applied.
	Applied Position
	// Families reports for each configured family whether a gateway session is up; read-only.
	Families map[vip.Family]bool
	// Advertised counts the VIPs that are reported as announced or de-preferred, Exported the
	// advertised VIPs that a gateway receives.
	Advertised, Exported int
	// At is the time of the newest message, or the time when Connected became false.
	At time.Time
}

// Report returns the summary of the newest report. Each message replaces it.
func (s *Server) Report() *latest.Value[Report] { return &s.report }

// Reported returns the frontend's report of a VIP.
func (s *Server) Reported(v vip.VIP) (VIPReport, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.reporting.vips[v]; r != nil {
		return r.VIPReport, true
	}
	return VIPReport{}, false
}

// AllReported returns a copy of the frontend's report of each VIP.
func (s *Server) AllReported() map[vip.VIP]VIPReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reporting.vips == nil {
		return nil
	}
	all := make(map[vip.VIP]VIPReport, len(s.reporting.vips))
	for v, r := range s.reporting.vips {
		all[v] = r.VIPReport
	}
	return all
}

// ReportAdvertisement implements the ReadinessService.
func (s *Server) ReportAdvertisement(stream grpc.ClientStreamingServer[readinessv1.ReportAdvertisementRequest,
	readinessv1.ReportAdvertisementResponse],
) error {
	ctx := stream.Context()
	id, done, err := s.openStream(ctx, "ReportAdvertisement", RoleFrontend)
	if err != nil {
		return err
	}
	// EndWatches cannot interrupt Recv, so Recv runs in a separate goroutine, which EndWatches waits
	// for. The return of this method ends the stream, which ends Recv and the goroutine.
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
		s.log.Warn("report stream ended", "peer", id.String(), "reason", err)
	}
	return err
}

// receive applies reports until the stream ends.
func (s *Server) receive(id spiffeid.ID, recv func() (*reportRequest, error)) error {
	var target *watch // watch of the first applied report
	defer func() {
		if target != nil {
			s.reportStreamEnded(target)
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
		d, complete, err := decodeReport(m)
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		w, err := s.applyReport(id, m.GetWatchId(), target, d, complete)
		if err != nil {
			return err
		}
		if w != nil {
			target = w
			continue
		}
		// The watch has ended or never existed, so its reports are obsolete.
		s.throttle.Log(s.log.Info, id.String(), "report ignored: no open watch of this peer", "peer", id.String(),
			"watch_id", cleanDetail(m.GetWatchId()))
	}
}

// applyReport applies one report and returns its watch; nil if the report was ignored. before is
// the watch of the stream's earlier reports.
func (s *Server) applyReport(id spiffeid.ID, watchID string, before *watch, d ReportDelta,
	complete bool,
) (*watch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.watches[watchID]
	if w == nil || w.Peer != id || (before != nil && before != w) {
		return nil, nil
	}
	if before == nil {
		// A stream starts with a full report, which replaces the report of the watch's earlier stream.
		w.streams++
		w.Report, w.vips = Report{WatchID: w.WatchID, Connected: true}, make(map[vip.VIP]*watchedVIP)
	}
	if err := w.apply(d, complete); err != nil {
		return w, err
	}
	// A newer watch takes over once its report is complete; any watch does if the current one has no
	// open report stream.
	if c := s.reporting; c == w || !s.hasReporter(c) || (w.seq > c.seq && w.Report.Complete) {
		if c != w {
			s.log.Info("reporting watch changed", "watch_id", w.WatchID, "peer", w.Peer.String())
		}
		s.reporting = w
		s.report.Set(w.Report)
	}
	return w, nil
}

// watchedVIP is the newest report of a VIP on one watch.
type watchedVIP struct {
	VIPReport
	message uint64 // number of the message that reported it
}

// apply applies a message of a report. After an error the stream ends, and the next one starts with
// a full report.
func (w *watch) apply(d ReportDelta, complete bool) error {
	w.reports++
	for i := range d.VIPs {
		reported := &d.VIPs[i]
		known := w.vips[reported.VIP]
		if known == nil {
			if len(w.vips) >= MaxVIPs {
				return status.Errorf(codes.ResourceExhausted, "more than %d VIPs are reported", MaxVIPs)
			}
			known = new(watchedVIP)
			w.vips[reported.VIP] = known
		}
		if known.message == w.reports {
			return status.Errorf(codes.InvalidArgument, "VIP %s is reported twice in one message", reported.VIP)
		}
		w.Report.Advertised += reported.advertised() - known.advertised()
		w.Report.Exported += reported.exported() - known.exported()
		*known = watchedVIP{reported.VIPReport, w.reports}
	}
	if d.Families != nil {
		w.Report.Families = d.Families
	}
	if complete {
		w.Report.Applied, w.Report.Complete = d.Applied, true
	}
	w.Report.At = time.Now()
	return nil
}

// advertised returns 1 for an advertised VIP; otherwise, and for the zero value, 0.
func (r *VIPReport) advertised() int {
	switch r.Advertisement {
	case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED, readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		return 1
	}
	return 0
}

// exported returns 1 for an advertised VIP that a gateway receives, otherwise 0.
func (r *VIPReport) exported() int {
	if r.Reason == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED {
		return 0
	}
	return r.advertised()
}

// reportStreamEnded handles the end of a report stream of the watch.
func (s *Server) reportStreamEnded(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.streams--; w.streams == 0 {
		s.selectReporting()
	}
}

// selectReporting selects the reporting watch after a watch or a report stream ended. If no watch
// has a report stream, the last report remains with Connected false. The caller holds s.mu.
func (s *Server) selectReporting() {
	if s.hasReporter(s.reporting) {
		return
	}
	var newest *watch
	for _, w := range s.watches {
		if s.hasReporter(w) && (newest == nil || w.precedes(newest)) {
			newest = w
		}
	}
	if newest != nil {
		s.reporting = newest
		s.report.Set(newest.Report)
	} else if r := &s.reporting.Report; r.Connected {
		r.Connected, r.At = false, time.Now()
		s.report.Set(*r)
	}
}

// precedes reports whether w is preferred to o as the reporting watch: complete reports first, then
// the newer watch.
func (w *watch) precedes(o *watch) bool {
	if w.Report.Complete != o.Report.Complete {
		return w.Report.Complete
	}
	return w.seq > o.seq
}

// hasReporter reports whether the watch is open and has an open report stream.
func (s *Server) hasReporter(w *watch) bool {
	return s.watches[w.WatchID] == w && w.streams > 0
}
