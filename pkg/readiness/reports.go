package readiness

import (
	"cmp"
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

// Report summarizes the frontend's report. Server.Reported and Server.AllReported return the VIPs.
//
// The reporting watch is the newest open watch of a frontend that has sent a full report. A watch
// without reports does not replace it, so a move to another connection leaves no gap.
type Report struct {
	// WatchID is the reporting watch; empty before the first report.
	WatchID string
	// Connected reports whether a report stream is open. The last report remains readable afterwards.
	Connected bool
	// Complete reports whether this watch received a full report: an unreported VIP is not advertised.
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
func (server *Server) Report() *latest.Value[Report] { return &server.report }

// Reported returns the frontend's report of a VIP.
func (server *Server) Reported(v vip.VIP) (VIPReport, bool) {
	server.mu.Lock()
	defer server.mu.Unlock()
	if report := server.reporting.vips[v]; report != nil {
		return report.VIPReport, true
	}
	return VIPReport{}, false
}

// AllReported returns a copy of the frontend's report of each VIP.
func (server *Server) AllReported() map[vip.VIP]VIPReport {
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.reporting.vips == nil {
		return nil
	}
	all := make(map[vip.VIP]VIPReport, len(server.reporting.vips))
	for name, report := range server.reporting.vips {
		all[name] = report.VIPReport
	}
	return all
}

// ReportAdvertisement implements the ReadinessService.
func (server *Server) ReportAdvertisement(stream grpc.ClientStreamingServer[readinessv1.ReportAdvertisementRequest,
	readinessv1.ReportAdvertisementResponse],
) error {
	ctx := stream.Context()
	id, done, err := server.openStream(ctx, "ReportAdvertisement", RoleFrontend)
	if err != nil {
		return err
	}
	// EndWatches cannot interrupt Recv, so Recv runs in a separate goroutine, which EndWatches waits
	// for. The return of this method ends the stream, which ends Recv and the goroutine.
	ended := make(chan error, 1)
	go func() {
		defer done()
		ended <- server.receive(id, stream.Recv)
	}()
	select {
	case err = <-ended:
	case <-server.stop:
		return errStopping
	}
	if err == nil {
		return stream.SendAndClose(&readinessv1.ReportAdvertisementResponse{})
	}
	if ctx.Err() == nil {
		server.log.Warn("report stream ended", "peer", id.String(), "reason", err)
	}
	return err
}

// receive applies reports until the stream ends.
func (server *Server) receive(id spiffeid.ID, recv func() (*reportRequest, error)) error {
	var target *watch // watch of the first applied report
	defer func() {
		if target != nil {
			server.reportStreamEnded(target)
		}
	}()
	for {
		message, err := recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		delta, complete, err := decodeReport(message)
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		watch, err := server.applyReport(id, message.GetWatchId(), target, delta, complete)
		target = cmp.Or(watch, target) // also of a report that is refused: the watch counts the stream
		if err != nil {
			return err
		}
		if watch != nil {
			continue
		}
		// The watch has ended or never existed, so its reports are obsolete.
		server.throttle.Log(server.log.Info, id.String(), "report ignored: no open watch of this peer", "peer", id.String(),
			"watch_id", cleanDetail(message.GetWatchId()))
	}
}

// applyReport applies one report and returns its watch; nil if the report was ignored. before is
// the watch of the stream's earlier reports.
func (server *Server) applyReport(id spiffeid.ID, watchID string, before *watch, delta ReportDelta,
	complete bool,
) (*watch, error) {
	server.mu.Lock()
	defer server.mu.Unlock()
	// The reports of a connection may arrive after its watch ended, in a move for example.
	watch := server.watches[watchID]
	if watch == nil || watch.Peer != id || (before != nil && before != watch) {
		return nil, nil
	}
	if before == nil {
		// A stream starts with a full report, which replaces the report of the watch's earlier stream.
		watch.streams++
		watch.Report, watch.vips = Report{WatchID: watch.WatchID, Connected: true}, make(map[vip.VIP]*watchedVIP)
	}
	if err := watch.apply(delta, complete); err != nil {
		return watch, err
	}
	// A newer watch takes over once its report is complete; any watch does if the current one has no
	// open report stream.
	current := server.reporting
	replaces := watch.seq > current.seq && watch.Report.Complete
	if current == watch || replaces || !server.hasReporter(current) {
		if current != watch {
			server.log.Info("reporting watch changed", "watch_id", watch.WatchID, "peer", watch.Peer.String())
		}
		server.reporting = watch
		server.report.Set(watch.Report)
	}
	return watch, nil
}

// watchedVIP is the newest report of a VIP on one watch.
type watchedVIP struct {
	VIPReport
	message uint64 // number of the message that reported it
}

// apply applies a message of a report. After an error the stream ends, and the next one starts with
// a full report.
func (watch *watch) apply(delta ReportDelta, complete bool) error {
	watch.reports++
	for i := range delta.VIPs {
		reported := &delta.VIPs[i]
		known := watch.vips[reported.VIP]
		if known == nil {
			if len(watch.vips) >= MaxVIPs {
				return status.Errorf(codes.ResourceExhausted, "more than %d VIPs are reported", MaxVIPs)
			}
			// A pointer, so that a later report of the VIP costs one map lookup.
			known = new(watchedVIP)
			watch.vips[reported.VIP] = known
		}
		if known.message == watch.reports {
			return status.Errorf(codes.InvalidArgument, "VIP %s is reported twice in one message", reported.VIP)
		}
		watch.Report.Advertised += reported.advertised() - known.advertised()
		watch.Report.Exported += reported.exported() - known.exported()
		*known = watchedVIP{reported.VIPReport, watch.reports}
	}
	if delta.Families != nil {
		watch.Report.Families = delta.Families
	}
	// The position of a report in parts holds once its last part was applied.
	if complete {
		watch.Report.Applied, watch.Report.Complete = delta.Applied, true
	}
	watch.Report.At = time.Now()
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

func (server *Server) reportStreamEnded(watch *watch) {
	server.mu.Lock()
	defer server.mu.Unlock()
	if watch.streams--; watch.streams == 0 {
		server.selectReporting()
	}
}

// selectReporting selects the reporting watch after a watch or a report stream ended. If no watch
// has a report stream, the last report remains with Connected false. The caller holds s.mu.
func (server *Server) selectReporting() {
	if server.hasReporter(server.reporting) {
		return
	}
	var newest *watch
	for _, watch := range server.watches {
		if server.hasReporter(watch) && (newest == nil || watch.precedes(newest)) {
			newest = watch
		}
	}
	if newest != nil {
		server.reporting = newest
		server.report.Set(newest.Report)
	} else if report := &server.reporting.Report; report.Connected {
		report.Connected, report.At = false, time.Now()
		server.report.Set(*report)
	}
}

// precedes reports whether w is preferred to o as the reporting watch: complete reports first, then
// the newer watch.
func (watch *watch) precedes(other *watch) bool {
	if watch.Report.Complete != other.Report.Complete {
		return watch.Report.Complete
	}
	return watch.seq > other.seq
}

// hasReporter reports whether the watch is open and has an open report stream.
func (server *Server) hasReporter(watch *watch) bool {
	return server.watches[watch.WatchID] == watch && watch.streams > 0
}
