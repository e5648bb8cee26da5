package registry

import (
	"context"
	"encoding/base64"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

const (
	// maxPage is how many addresses one message of List and Watch has at most, maxPageBytes how many
	// bytes: clients accept 4 MiB by default.
	maxPage      = 2000
	maxPageBytes = 1 << 20
)

// wireStates are the states of the protocol.
var wireStates = [...]targetv1.State{
	healthcheck.Starting: targetv1.State_STATE_STARTING,
	healthcheck.Ready:    targetv1.State_STATE_READY,
	healthcheck.NotReady: targetv1.State_STATE_NOT_READY,
	healthcheck.Overdue:  targetv1.State_STATE_OVERDUE,
	healthcheck.Draining: targetv1.State_STATE_DRAINING,
	healthcheck.Drained:  targetv1.State_STATE_DRAINED,
	healthcheck.Left:     targetv1.State_STATE_GONE,
}

// filter is what a caller may see of targets.
type filter struct {
	who caller
	all bool // including who registered what
	now time.Time
}

func (s *Service) filter(who caller) filter {
	return filter{who, who.operator() || s.Reader != nil && s.Reader(who.id), time.Now()}
}

// info is a target as it is sent.
func (f filter) info(v targetset.View) *targetv1.TargetInfo {
	i := &targetv1.TargetInfo{
		Stream: v.Stream, Name: v.Name, Address: v.Addr.String(), State: wireStates[v.State],
		Since: timestamppb.New(v.Since), LastError: strings.ToValidUTF8(v.LastError, "?"),
		DrainCause: v.DrainCause, Sources: v.Origins.Names(),
	}
	if v.State == healthcheck.Draining {
		i.DrainFor = durationpb.New(max(0, v.DrainEnd.Sub(f.now)))
	}
	if f.all || v.Owner == f.who.String() {
		i.RegisteredBy = v.Owner
	}
	return i
}

// gone is the last message about an address.
func gone(k healthcheck.Key) *targetv1.TargetInfo {
	return &targetv1.TargetInfo{
		Stream: k.Stream, Name: k.Name, Address: k.Addr.String(),
		State: targetv1.State_STATE_GONE, Since: timestamppb.Now(),
	}
}

// visible returns which targets of one stream the caller may see, or of all when stream is "".
func (s *Service) visible(f filter, stream string) (func(healthcheck.Key) bool, error) {
	r, who := s.registry, f.who
	switch {
	case !f.all && !r.Allow.Authorizes(who.id):
		return nil, refuse(RefusedIdentity, "%s may not see targets: "+
			"have it allowed by --target-id or --reader-id of the load balancer", who)
	case stream == "" && f.all:
		return nil, nil
	case stream == "":
		seen := map[string]bool{} // without a lock: the index asks for one key at a time
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
		views := s.index.List(wanted)
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
		page, rest := f.page(views, size)
		resp = &targetv1.ListResponse{Targets: page}
		if len(rest) > 0 {
			resp.NextPageToken = token(views[len(page)-1].Key)
		}
		return nil
	})
	return resp, err
}

// page returns the next message of a list, and what remains.
func (f filter) page(views []targetset.View, size int) (page []*targetv1.TargetInfo, rest []targetset.View) {
	bytes := 0
	for i, v := range views {
		info := f.info(v)
		bytes += proto.Size(info) + 8 // its tag and length
		if i == size || (i > 0 && bytes > maxPageBytes) {
			return page, views[i:]
		}
		page = append(page, info)
	}
	return page, nil
}

// token is where a page ended. Names of streams and targets contain no slash.
func token(k healthcheck.Key) string {
	return base64.RawURLEncoding.EncodeToString([]byte(k.Stream + "/" + k.Name + "/" + k.Addr.String()))
}

func parseToken(s string) (healthcheck.Key, bool) {
	text, err := base64.RawURLEncoding.DecodeString(s)
	parts := strings.Split(string(text), "/")
	if err != nil || len(parts) != 3 {
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
		done, err := s.registry.begin(who)
		if err != nil {
			return err
		}
		defer done()
		watch := s.index.Watch(wanted)
		defer watch.Close()
		for first := true; ; first = false {
			changed, removed := watch.Take()
			if first || len(changed)+len(removed) > 0 {
				if err := s.filter(who).send(changed, removed, first, stream.Send); err != nil {
					return err
				}
			}
			if err := s.wait(stream.Context(), watch.Changed(), nil); err != nil {
				return err
			}
		}
	})
}

// send sends changes in as many messages as they need, and marks the last one when they are everything.
func (f filter) send(
	changed []targetset.View, removed []healthcheck.Key, everything bool, send func(*targetv1.WatchResponse) error,
) error {
	for {
		m := &targetv1.WatchResponse{}
		m.Targets, changed = f.page(changed, maxPage)
		for len(changed) == 0 && len(removed) > 0 && len(m.Targets) < maxPage {
			m.Targets = append(m.Targets, gone(removed[0]))
			removed = removed[1:]
		}
		done := len(changed)+len(removed) == 0
		m.Complete = everything && done
		if err := send(m); err != nil || done {
			return err
		}
	}
}
