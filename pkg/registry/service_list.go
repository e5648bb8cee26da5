package registry

import (
	"context"
	"encoding/base64"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

const (
	// maxPage is how many addresses one message of List and Watch has at most,
	// maxPageBytes how many bytes: clients take 4 MiB unless they say otherwise.
	maxPage      = 2000
	maxPageBytes = 1 << 20
)

// glass is through which a caller sees targets.
type glass struct {
	who caller
	// all is true for those who may see who registered what.
	all bool
	now time.Time
}

func (s *Service) glass(who caller) glass {
	return glass{who: who, all: s.seesAll(who), now: time.Now()}
}

func (s *Service) seesAll(who caller) bool {
	return who.operator() || (s.opts.Reader != nil && s.opts.Reader(who.id))
}

// wireStates are the states on the wire.
var wireStates = map[healthcheck.State]targetv1.State{
	healthcheck.Starting: targetv1.State_STATE_STARTING,
	healthcheck.Ready:    targetv1.State_STATE_READY,
	healthcheck.NotReady: targetv1.State_STATE_NOT_READY,
	healthcheck.Overdue:  targetv1.State_STATE_OVERDUE,
	healthcheck.Draining: targetv1.State_STATE_DRAINING,
	healthcheck.Drained:  targetv1.State_STATE_DRAINED,
	healthcheck.Left:     targetv1.State_STATE_GONE,
}

// info is a target as it is sent.
func (g glass) info(v targetset.View) *targetv1.TargetInfo {
	i := &targetv1.TargetInfo{
		Stream: v.Stream, Name: v.Name, Address: v.Addr.String(), State: wireStates[v.State], Since: timestamppb.New(v.Since),
		LastError: strings.ToValidUTF8(v.LastError, "?"), DrainCause: v.DrainCause, Sources: v.Origins.Names(),
	}
	if v.State == healthcheck.Draining {
		i.DrainFor = durationpb.New(max(0, v.DrainEnd.Sub(g.now)))
	}
	if g.all || v.Owner == g.who.String() {
		i.RegisteredBy = v.Owner
	}
	return i
}

// last is the last word on an address.
func last(k healthcheck.Key) *targetv1.TargetInfo {
	return &targetv1.TargetInfo{Stream: k.Stream, Name: k.Name, Address: k.Addr.String(), State: wireStates[healthcheck.Left], Since: timestamppb.Now()}
}

// sight returns what a caller may see of one stream, or of all when stream is "".
func (s *Service) sight(who caller, stream string) (func(healthcheck.Key) bool, error) {
	all := s.seesAll(who)
	switch {
	case !all && !s.registry.Allow.Authorizes(who.id):
		return nil, refuse(RefusedIdentity, codes.PermissionDenied, "%s may not see targets: have it allowed by --target-id or --reader-id of the load balancer", who)
	case stream == "" && all:
		return func(healthcheck.Key) bool { return true }, nil
	case stream != "":
		if !all && !s.registry.allows(who, stream) {
			return nil, refuse(RefusedIdentity, codes.PermissionDenied, "%s may not see the targets of stream %s: have it allowed by --target-id of the load balancer", who, targetset.Quote(stream))
		}
		if err := s.registry.knows(who, stream); err != nil {
			return nil, err
		}
		return func(k healthcheck.Key) bool { return k.Stream == stream }, nil
	}
	// The index asks one key at a time: the answers may be kept without a lock.
	seen := map[string]bool{}
	return func(k healthcheck.Key) bool {
		may, asked := seen[k.Stream]
		if !asked {
			may = s.registry.allows(who, k.Stream)
			seen[k.Stream] = may
		}
		return may
	}, nil
}

// knows refuses the name of a stream that the trench file does not have.
func (r *Registry) knows(who caller, stream string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.streams[stream]; ok {
		return nil
	}
	if r.streams == nil {
		return errStarting
	}
	return refuse(RefusedStream, codes.NotFound, "the trench file has no stream %s: use one of %s", targetset.Quote(stream), r.existing(who))
}

// List implements the TargetService.
func (s *Service) List(ctx context.Context, req *targetv1.ListRequest) (*targetv1.ListResponse, error) {
	who, err := s.caller(ctx)
	var resp *targetv1.ListResponse
	if err == nil {
		resp, err = s.list(who, req)
	}
	if err != nil {
		return nil, s.logRefusal(who, "List", req.GetStream(), err)
	}
	return resp, nil
}

func (s *Service) list(who caller, req *targetv1.ListRequest) (*targetv1.ListResponse, error) {
	wanted, err := s.sight(who, req.GetStream())
	if err != nil {
		return nil, err
	}
	views := s.index.List(wanted)
	if token := req.GetPageToken(); token != "" {
		after, ok := parseToken(token)
		if !ok {
			return nil, refuse(RefusedInput, codes.InvalidArgument, "page_token %s is unknown: send next_page_token of the previous answer, or none for the first page", targetset.Quote(token))
		}
		n, found := slices.BinarySearchFunc(views, after, func(v targetset.View, k healthcheck.Key) int { return v.Compare(k) })
		if found {
			n++
		}
		views = views[n:]
	}
	size := int(min(req.GetPageSize(), maxPage))
	if size == 0 {
		size = maxPage
	}
	resp := &targetv1.ListResponse{}
	page, rest := s.glass(who).page(views, size)
	resp.Targets = page
	if len(rest) > 0 {
		resp.NextPageToken = token(views[len(page)-1].Key)
	}
	return resp, nil
}

// page makes the next message of a list, and returns what is left.
func (g glass) page(views []targetset.View, size int) (page []*targetv1.TargetInfo, rest []targetset.View) {
	bytes := 0
	for i, v := range views {
		info := g.info(v)
		bytes += proto.Size(info) + 8 // its tag and length
		if i == size || (i > 0 && bytes > maxPageBytes) {
			return page, views[i:]
		}
		page = append(page, info)
	}
	return page, nil
}

// token is where a page ended. Neither streams nor names have a slash.
func token(k healthcheck.Key) string {
	return base64.RawURLEncoding.EncodeToString([]byte(k.Stream + "/" + k.Name + "/" + k.Addr.String()))
}

func parseToken(s string) (healthcheck.Key, bool) {
	text, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return healthcheck.Key{}, false
	}
	parts := strings.Split(string(text), "/")
	if len(parts) != 3 {
		return healthcheck.Key{}, false
	}
	addr, err := netip.ParseAddr(parts[2])
	return healthcheck.Key{Stream: parts[0], Name: parts[1], Addr: addr}, err == nil
}

// Watch implements the TargetService.
func (s *Service) Watch(req *targetv1.WatchRequest, stream grpc.ServerStreamingServer[targetv1.WatchResponse]) error {
	who, err := s.caller(stream.Context())
	if err == nil {
		err = s.watch(who, req, stream)
	}
	return s.logRefusal(who, "Watch", req.GetStream(), err)
}

func (s *Service) watch(who caller, req *targetv1.WatchRequest, stream grpc.ServerStreamingServer[targetv1.WatchResponse]) error {
	wanted, err := s.sight(who, req.GetStream())
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
	for first := true; ; {
		changed, removed := watch.Take()
		if first || len(changed)+len(removed) > 0 {
			if err := s.glass(who).send(changed, removed, first, stream.Send); err != nil {
				return err
			}
			first = false
		}
		select {
		case <-watch.Changed():
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-s.registry.stop:
			return errStopping
		}
	}
}

// send sends changes in as many messages as they need, and marks the last one when
// they are everything.
func (g glass) send(changed []targetset.View, removed []healthcheck.Key, everything bool, send func(*targetv1.WatchResponse) error) error {
	for {
		m := &targetv1.WatchResponse{}
		m.Targets, changed = g.page(changed, maxPage)
		for len(changed) == 0 && len(removed) > 0 && len(m.Targets) < maxPage {
			m.Targets = append(m.Targets, last(removed[0]))
			removed = removed[1:]
		}
		done := len(changed)+len(removed) == 0
		m.Complete = everything && done
		if err := send(m); err != nil || done {
			return err
		}
	}
}
