package registry

import (
	"cmp"
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

func (service *Service) filter(who caller) filter {
	return filter{who, who.operator() || service.Reader != nil && service.Reader(who.id)}
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

func (filter filter) info(view targetset.View) *targetv1.TargetInfo {
	info := &targetv1.TargetInfo{
		Stream: view.Stream, Name: view.Name, Address: view.Addr.String(),
		State: states[view.State],
		Since: timestamppb.New(view.Since), LastError: strings.ToValidUTF8(view.LastError, "?"),
		DrainCause: view.DrainCause, Sources: view.Origins.Names(),
	}
	if view.State == healthcheck.Draining {
		info.DrainFor = durationpb.New(max(0, time.Until(view.DrainEnd)))
	}
	if filter.all || view.Owner == filter.who.String() {
		info.RegisteredBy = view.Owner
	}
	return info
}

func (filter filter) infos(views []targetset.View, removed []healthcheck.Key) (infos []*targetv1.TargetInfo) {
	for _, view := range views {
		infos = append(infos, filter.info(view))
	}
	for _, key := range removed {
		infos = append(infos, gone(key))
	}
	return infos
}

// gone returns the last message about an address.
func gone(key healthcheck.Key) *targetv1.TargetInfo {
	return &targetv1.TargetInfo{
		Stream: key.Stream, Name: key.Name, Address: key.Addr.String(),
		State: targetv1.State_STATE_GONE, Since: timestamppb.Now(),
	}
}

// visible returns a predicate for the targets of a stream that the caller may see; nil: all
// targets. If stream is "", the predicate covers all streams.
func (service *Service) visible(filter filter, stream string) (func(healthcheck.Key) bool, error) {
	registry, who := service.Registry, filter.who
	switch {
	case !filter.all && !registry.Allow.Authorizes(who.id):
		return nil, refuse(RefusedIdentity, "%s may not see targets: "+
			"have it allowed by --target-id or --reader-id of the load balancer", who)
	case stream == "" && filter.all:
		return nil, nil
	case stream == "":
		seen := map[string]bool{} // needs no lock: the index does not call the predicate concurrently
		return func(key healthcheck.Key) bool {
			may, known := seen[key.Stream]
			if !known {
				may = registry.allows(who, key.Stream)
				seen[key.Stream] = may
			}
			return may
		}, nil
	case !filter.all && !registry.allows(who, stream):
		return nil, refuse(RefusedIdentity, "%s may not see the targets of stream %s: "+
			"have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.streams == nil {
		return nil, errStarting
	}
	if _, ok := registry.streams[stream]; !ok {
		return nil, registry.unknownStream(who, stream)
	}
	return func(key healthcheck.Key) bool { return key.Stream == stream }, nil
}

// List implements the TargetService.
func (service *Service) List(ctx context.Context, req *targetv1.ListRequest) (resp *targetv1.ListResponse, err error) {
	err = service.serve(ctx, "List", req.GetStream(), func(who caller) error {
		filter := service.filter(who)
		wanted, err := service.visible(filter, req.GetStream())
		if err != nil {
			return err
		}
		// Each page lists again: the token holds the last key, so the server keeps no state of callers.
		views := service.Index.List(wanted)
		if token := req.GetPageToken(); token != "" {
			after, ok := parseToken(token)
			if !ok {
				return refuse(RefusedInput, "page_token %s is unknown: "+
					"send next_page_token of the previous answer, or none for the first page", targetset.Quote(token))
			}
			// The target of the token may have left: continue after its place in the order.
			compare := func(view targetset.View, key healthcheck.Key) int { return view.Compare(key) }
			start, found := slices.BinarySearchFunc(views, after, compare)
			if found {
				start++
			}
			views = views[start:]
		}
		size := int(cmp.Or(min(req.GetPageSize(), maxPage), maxPage))
		resp = &targetv1.ListResponse{}
		if len(views) > size {
			views = views[:size]
			resp.NextPageToken = token(views[size-1].Key)
		}
		resp.Targets = filter.infos(views, nil)
		return nil
	})
	return resp, err
}

// token encodes the last key of a page. Names of streams and targets contain no slash.
func token(key healthcheck.Key) string { return key.Stream + "/" + key.Name + "/" + key.Addr.String() }

func parseToken(text string) (healthcheck.Key, bool) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		return healthcheck.Key{}, false
	}
	addr, err := netip.ParseAddr(parts[2])
	return healthcheck.Key{Stream: parts[0], Name: parts[1], Addr: addr}, err == nil
}

// Watch implements the TargetService.
func (service *Service) Watch(req *targetv1.WatchRequest,
	stream grpc.ServerStreamingServer[targetv1.WatchResponse],
) error {
	return service.serve(stream.Context(), "Watch", req.GetStream(), func(who caller) error {
		wanted, err := service.visible(service.filter(who), req.GetStream())
		if err != nil {
			return err
		}
		done, err := service.Registry.begin(who)
		if err != nil {
			return err
		}
		defer done()
		watch := service.Index.Watch(wanted)
		defer watch.Close()
		for first := true; ; first = false {
			changed, removed := watch.Take()
			infos := service.filter(who).infos(changed, removed)
			// Only the last message of the first state is marked as complete.
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
			if err := service.wait(stream.Context(), watch.Changed(), nil); err != nil {
				return err
			}
		}
	})
}
