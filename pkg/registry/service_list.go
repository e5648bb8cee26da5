package registry

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// maxPage limits the addresses in one message of List and Watch. Each address takes up to 2.7 KB,
// most of it for the SPIFFE ID, and gRPC clients accept messages of 4 MiB by default.
const maxPage = 1000

// filter restricts the visible targets and fields to the authorization of a caller.
type filter struct {
	who caller
	all bool // the caller may see all targets and their owners
}

func (s *Service) filter(who caller) filter {
	return filter{who, who.operator() || s.Reader != nil && s.Reader(who.id)}
}

var states = [...]targetv1.State{
	healthcheck.Starting: targetv1.State_STATE_STARTING,
	healthcheck.Ready:    targetv1.State_STATE_READY,
	healthcheck.NotReady: targetv1.State_STATE_NOT_READY,
	healthcheck.Overdue:  targetv1.State_STATE_OVERDUE,
	healthcheck.Draining: targetv1.State_STATE_DRAINING,
	healthcheck.Drained:  targetv1.State_STATE_DRAINED,
	healthcheck.Left:     targetv1.State_STATE_GONE,
}

// info returns the message for a target.
func (f filter) info(v targetset.View) *targetv1.TargetInfo {
	i := &targetv1.TargetInfo{
		Stream: v.Stream, Name: v.Name, Address: v.Addr.String(),
		State: states[v.State],
		Since: timestamppb.New(v.Since), LastError: strings.ToValidUTF8(v.LastError, "?"),
		DrainCause: v.DrainCause, Sources: v.Origins.Names(),
	}
	if v.State == healthcheck.Draining {
		i.DrainFor = durationpb.New(max(0, time.Until(v.DrainEnd)))
	}
	if f.all || v.Owner == f.who.String() {
		i.RegisteredBy = v.Owner
	}
	return i
}

// infos returns the messages for targets and removed addresses.
func (f filter) infos(views []targetset.View, removed []healthcheck.Key) (infos []*targetv1.TargetInfo) {
	for _, v := range views {
		infos = append(infos, f.info(v))
	}
	for _, k := range removed {
		infos = append(infos, gone(k))
	}
	return infos
}

// gone returns the last message about an address.
func gone(k healthcheck.Key) *targetv1.TargetInfo {
	return &targetv1.TargetInfo{
		Stream: k.Stream, Name: k.Name, Address: k.Addr.String(),
		State: targetv1.State_STATE_GONE, Since: timestamppb.Now(),
	}
}

// visible returns a predicate for the targets of a stream that the caller may see; nil: all
// targets. If stream is "", the predicate covers all streams.
func (s *Service) visible(f filter, stream string) (func(healthcheck.Key) bool, error) {
	r, who := s.Registry, f.who
	switch {
	case !f.all && !r.Allow.Authorizes(who.id):
		return nil, refuse(RefusedIdentity, "%s may not see targets: "+
			"have it allowed by --target-id or --reader-id of the load balancer", who)
	case stream == "" && f.all:
		return nil, nil
	case stream == "":
		seen := map[string]bool{} // needs no lock: the index does not call the predicate concurrently
		return func(k healthcheck.Key) bool {
			may, known := seen[k.Stream]
			if !known {
				may = r.allows(who, k.Stream)
				seen[k.Stream] = may
			}
			return may
		}, nil
	case !f.all && !r.allows(who, stream):
		return nil, refuse(RefusedIdentity, "%s may not see the targets of stream %s: "+
			"have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams == nil {
		return nil, errStarting
	}
	if _, ok := r.streams[stream]; !ok {
		return nil, r.unknownStream(who, stream)
	}
	return func(k healthcheck.Key) bool { return k.Stream == stream }, nil
}

// List implements the TargetService.
func (s *Service) List(ctx context.Context, req *targetv1.ListRequest) (resp *targetv1.ListResponse, err error) {
	err = s.serve(ctx, "List", req.GetStream(), func(who caller) error {
		f := s.filter(who)
		wanted, err := s.visible(f, req.GetStream())
		if err != nil {
			return err
		}
		views := s.Index.List(wanted)
		if token := req.GetPageToken(); token != "" {
			after, ok := parseToken(token)
			if !ok {
				return refuse(RefusedInput, "page_token %s is unknown: "+
					"send next_page_token of the previous answer, or none for the first page", targetset.Quote(token))
			}
			compare := func(v targetset.View, k healthcheck.Key) int { return v.Compare(k) }
			n, found := slices.BinarySearchFunc(views, after, compare)
			if found {
				n++
			}
			views = views[n:]
		}
		size := int(min(req.GetPageSize(), maxPage))
		if size == 0 {
			size = maxPage
		}
		resp = &targetv1.ListResponse{}
		if len(views) > size {
			views = views[:size]
			resp.NextPageToken = token(views[size-1].Key)
		}
		resp.Targets = f.infos(views, nil)
		return nil
	})
	return resp, err
}

// token encodes the last key of a page. Names of streams and targets contain no slash.
func token(k healthcheck.Key) string { return k.Stream + "/" + k.Name + "/" + k.Addr.String() }

func parseToken(s string) (healthcheck.Key, bool) {
	parts := strings.Split(s, "/")
	if len(parts) != 3 {
		return healthcheck.Key{}, false
	}
	addr, err := netip.ParseAddr(parts[2])
	return healthcheck.Key{Stream: parts[0], Name: parts[1], Addr: addr}, err == nil
}

// Watch implements the TargetService.
func (s *Service) Watch(req *targetv1.WatchRequest, stream grpc.ServerStreamingServer[targetv1.WatchResponse]) error {
	return s.serve(stream.Context(), "Watch", req.GetStream(), func(who caller) error {
		wanted, err := s.visible(s.filter(who), req.GetStream())
		if err != nil {
			return err
		}
		done, err := s.Registry.begin(who)
		if err != nil {
			return err
		}
		defer done()
		watch := s.Index.Watch(wanted)
		defer watch.Close()
		for first := true; ; first = false {
			changed, removed := watch.Take()
			infos := s.filter(who).infos(changed, removed)
			for len(infos) > maxPage {
				if err := stream.Send(&targetv1.WatchResponse{Targets: infos[:maxPage]}); err != nil {
					return err
				}
				infos = infos[maxPage:]
			}
			if first || len(infos) > 0 {
				if err := stream.Send(&targetv1.WatchResponse{Targets: infos, Complete: first}); err != nil {
					return err
				}
			}
			if err := s.wait(stream.Context(), watch.Changed(), nil); err != nil {
				return err
			}
		}
	})
}
