package feedback

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Bounds of a report.
const (
	maxPaths    = 1 << 16
	maxSources  = 32
	maxInstance = 64
)

// Report implements the ProbeService.
func (feedback *Feedback) Report(ctx context.Context, request *probev1.ReportRequest) (*probev1.ReportResponse, error) {
	id, known := identity.PeerID(ctx)
	now, err := time.Now(), error(nil)
	var reported *probe
	if !known || !slices.Contains(feedback.Probes, id) {
		err = grpcstatus.Errorf(codes.PermissionDenied, "%s may not report verdicts: "+
			"have it allowed by --probe-id of the load balancer", id)
	} else {
		reported, err = parseReport(request)
	}
	feedback.mu.Lock()
	defer feedback.mu.Unlock()
	before := feedback.probes[id]
	if err == nil && before != nil && now.Sub(before.reported) < Lease && before.instance != reported.instance {
		err = grpcstatus.Errorf(codes.AlreadyExists, "another probe reports as %s: give each its own SPIFFE ID, "+
			"or wait %v after a restart", id, Lease)
	}
	if err != nil {
		feedback.refused++
		feedback.throttle.Log(feedback.Log.Warn, id.String(), "report of a probe refused", "peer", id.String(), "error",
			grpcstatus.Convert(err).Message())
		return nil, err
	}
	reported.reported, reported.live = now, before != nil && before.live
	if before != nil {
		for f := range reported.seen {
			reported.seen[f] = before.seen[f]
		}
	}
	feedback.probes[id] = reported
	latest.Wake(feedback.wake)
	return &probev1.ReportResponse{Lease: durationpb.New(Lease)}, nil
}

func parseReport(request *probev1.ReportRequest) (*probe, error) {
	invalid := func(format string, args ...any) (*probe, error) {
		return nil, grpcstatus.Errorf(codes.InvalidArgument, format, args...)
	}
	if n := len(request.GetInstance()); n == 0 || n > maxInstance {
		return invalid("instance has %d bytes: use 1 to %d", n, maxInstance)
	}
	reported := &probe{
		instance: request.GetInstance(), paths: make(map[vip.VIP]paths, len(request.GetVips())),
		seen:   map[flow]time.Time{},
		window: min(max(request.GetRound().AsDuration(), minWindow), maxWindow),
	}
	count := 0
	for _, verdict := range request.GetVips() {
		v, err := vip.Parse(verdict.GetVip())
		if err != nil {
			return invalid("%.50q is not a VIP: %v", verdict.GetVip(), err)
		}
		var all paths
		for _, source := range verdict.GetSources() {
			address, err := netip.ParseAddr(source.GetAddress())
			if err != nil || address.Zone() != "" || address.Is4In6() {
				return invalid("%.50q is not a source address", source.GetAddress())
			}
			if !slices.Contains(reported.sources, address) {
				reported.sources = append(reported.sources, address)
			}
			count += len(source.GetReachablePorts()) + len(source.GetDeadPorts())
			if len(reported.sources) > maxSources || count > maxPaths {
				return invalid("more than %d sources or %d paths", maxSources, maxPaths)
			}
			for _, list := range []struct {
				from []uint32
				to   *[]netip.AddrPort
			}{{source.GetReachablePorts(), &all.reachable}, {source.GetDeadPorts(), &all.dead}} {
				for _, port := range list.from {
					from := netip.AddrPortFrom(address, uint16(port))
					*list.to = append(*list.to, from)
					reported.seen[flow{from, v.Prefix().Addr()}] = time.Time{}
				}
			}
		}
		reported.paths[v] = all
	}
	return reported, nil
}
