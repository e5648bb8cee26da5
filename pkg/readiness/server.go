package readiness

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/vip"
)

// DefaultMaxStreamsPerPeer limits the open streams of one SPIFFE ID. A frontend needs two, and four
// during a move.
const DefaultMaxStreamsPerPeer = 8

// ServerOptions configure a Server.
type ServerOptions struct {
	// Peer returns the SPIFFE ID that the transport has authenticated.
	Peer func(context.Context) (spiffeid.ID, bool)
	// Role returns the role of a peer; see RolesOf.
	Role func(spiffeid.ID) Role
	// MaxStreamsPerPeer bounds the open streams of one SPIFFE ID. Default: DefaultMaxStreamsPerPeer.
	MaxStreamsPerPeer int
	Log               *slog.Logger
}

// Server serves a Table as the ReadinessService.
type Server struct {
	readinessv1.UnimplementedReadinessServiceServer

	table    *Table
	opts     ServerOptions
	log      *slog.Logger
	throttle logs.Throttle
	report   latest.Value[Report]

	mu        sync.Mutex
	watches   map[string]*watch
	opened    uint64              // number of watches since the start
	streams   map[spiffeid.ID]int // running handlers
	reporting *watch              // an empty watch until the first report
	stop      chan struct{}       // closed by EndWatches
	idle      chan struct{}       // closed after stop, once all handlers have returned
}

// watch is one open WatchReadiness stream.
type watch struct {
	WatcherInfo        // SentRevision and Reporting are not set
	seq         uint64 // order of opening
	cursor      *cursor

	// vips holds the reports that name this watch. Server.mu guards it, streams and Report.
	vips    map[vip.VIP]*watchedVIP
	reports uint64 // number of applied messages
	streams int    // open report streams
}

// WatcherInfo describes an open watch.
type WatcherInfo struct {
	WatchID string
	Peer    spiffeid.ID
	Reader  string // name that the reader sent
	Since   time.Time
	// SentRevision is the newest revision that was sent on the stream.
	SentRevision uint64
	// Reporting reports whether this is the reporting watch.
	Reporting bool
	Report    Report // of the reports that name this watch
}

// NewServer returns a server of the table. Its grpc.Server needs GRPCOptions.
func NewServer(table *Table, options ServerOptions) *Server {
	options.MaxStreamsPerPeer = cmp.Or(options.MaxStreamsPerPeer, DefaultMaxStreamsPerPeer)
	return &Server{
		table: table, opts: options, log: cmp.Or(options.Log, slog.New(slog.DiscardHandler)),
		watches: make(map[string]*watch), reporting: &watch{}, streams: make(map[spiffeid.ID]int),
		stop: make(chan struct{}), idle: make(chan struct{}),
	}
}

// GRPCOptions returns the options that a grpc.Server for readiness needs: the receive limit; timeouts
// for peers that do not finish their handshake or have no open call; and a keepalive policy that
// accepts one ping per second, so that no gRPC client gets too_many_pings. Stop of the grpc.Server
// waits for the handlers.
func GRPCOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessageBytes),
		grpc.StaticStreamWindowSize(flowWindow),
		grpc.StaticConnWindowSize(flowWindow),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.MaxConcurrentStreams(64),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}

// authorize returns the peer, or an error if its role is lower than least.
func (server *Server) authorize(ctx context.Context, method string, least Role) (spiffeid.ID, error) {
	id, ok := server.opts.Peer(ctx)
	if !ok {
		return id, status.Error(codes.Unauthenticated, "the connection has no SPIFFE ID")
	}
	if server.opts.Role(id) < least {
		server.throttle.Log(server.log.Warn, id.String(), "call denied on the readiness socket", "peer", id.String(),
			"method", method)
		return id, status.Errorf(codes.PermissionDenied, "%s may not call %s", id, method)
	}
	return id, nil
}

// openStream authorizes and counts a stream; done must be called when the stream ends.
func (server *Server) openStream(ctx context.Context, method string, least Role) (id spiffeid.ID, done func(),
	err error,
) {
	if id, err = server.authorize(ctx, method, least); err != nil {
		return id, nil, err
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	// EndWatches closes stop under the same lock, so idle is closed after the last counted stream.
	if isClosed(server.stop) {
		return id, nil, errStopping
	}
	if server.streams[id] >= server.opts.MaxStreamsPerPeer {
		server.throttle.Log(server.log.Warn, id.String(), "stream refused on the readiness socket: too many open streams",
			"peer", id.String(), "limit", server.opts.MaxStreamsPerPeer)
		return id, nil, status.Errorf(codes.ResourceExhausted, "%s has %d open streams, the limit", id, server.streams[id])
	}
	server.streams[id]++
	return id, func() {
		server.mu.Lock()
		defer server.mu.Unlock()
		if server.streams[id]--; server.streams[id] == 0 {
			delete(server.streams, id)
		}
		if len(server.streams) == 0 && isClosed(server.stop) {
			close(server.idle)
		}
	}, nil
}

// stoppingText is the status message by which the watcher recognizes an orderly stop.
const stoppingText = "the load balancer is stopping"

var errStopping = status.Error(codes.Unavailable, stoppingText)

// EndWatches ends all streams, refuses new ones, and waits for the handlers. If a client has
// stopped reading, the handler ends only with the connection. Therefore ctx bounds the wait; stop
// the grpc.Server afterwards.
func (server *Server) EndWatches(ctx context.Context) error {
	server.mu.Lock()
	if !isClosed(server.stop) {
		close(server.stop)
		if len(server.streams) == 0 {
			close(server.idle)
		}
	}
	server.mu.Unlock()
	select {
	case <-server.idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("failed to end readiness streams: %w", ctx.Err())
	}
}

// WatchReadiness implements the ReadinessService.
func (server *Server) WatchReadiness(req *readinessv1.WatchReadinessRequest,
	stream grpc.ServerStreamingServer[response],
) error {
	ctx := stream.Context()
	id, done, err := server.openStream(ctx, "WatchReadiness", RoleReader)
	if err != nil {
		return err
	}
	defer done()
	watch := server.openWatch(id, req.GetReader())
	defer server.closeWatch(watch)
	log := server.log.With("watch_id", watch.WatchID, "peer", id.String(), "reader", watch.Reader)
	note := func(message string, attrs ...any) {
		// The frontend of the pod reconnects with back-off. Other readers may reconnect in a loop, so
		// their messages are throttled.
		if server.opts.Role(id) == RoleFrontend {
			log.Info(message, attrs...)
			return
		}
		server.throttle.Log(log.Info, id.String(), message, attrs...)
	}
	note("readiness watch opened")
	err = server.serve(ctx, watch, stream.Send)
	note("readiness watch ended", "open_for", time.Since(watch.Since), "reason", err)
	return err
}

func (server *Server) openWatch(id spiffeid.ID, reader string) *watch {
	info := WatcherInfo{WatchID: rand.Text(), Peer: id, Reader: cleanDetail(reader), Since: time.Now()}
	opened := &watch{WatcherInfo: info, cursor: server.table.open()}
	server.mu.Lock()
	defer server.mu.Unlock()
	server.opened++
	opened.seq = server.opened
	server.watches[opened.WatchID] = opened
	return opened
}

func (server *Server) closeWatch(watch *watch) {
	server.table.close(watch.cursor)
	server.mu.Lock()
	defer server.mu.Unlock()
	delete(server.watches, watch.WatchID)
	server.selectReporting()
}

// serve sends the watch's batches until the stream or server ends. A slow reader blocks no other.
func (server *Server) serve(ctx context.Context, watch *watch, send func(*response) error) error {
	for !isClosed(server.stop) {
		batch := server.table.next(watch.cursor, time.Now())
		if batch.kind == kindNone {
			if err := server.wait(ctx, watch); err != nil {
				return err
			}
			continue
		}
		for message := range batch.messages() {
			// Only the first part of the first batch describes the watch.
			if batch.first {
				batch.first = false
				message.WatchId, message.StaleGrace = watch.WatchID, server.table.staleGrace
			}
			// Compute the lease for each part: a slow reader may delay a long snapshot. If the loop that
			// renews the lease hangs in between, the remaining parts wait for the next renewal.
			lease, ok := server.table.currentLease(time.Now())
			for ; !ok; lease, ok = server.table.currentLease(time.Now()) {
				if err := server.wait(ctx, watch); err != nil {
					return err
				}
			}
			message.Position, message.Lease = batch.position.Proto(), durationpb.New(lease)
			message.Held = *server.table.held.Load()
			if err := send(message); err != nil {
				return err
			}
		}
	}
	return errStopping
}

func (server *Server) wait(ctx context.Context, watch *watch) error {
	select {
	case <-watch.cursor.wake:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-server.stop:
		return errStopping
	}
}

// GetReadiness implements the ReadinessService.
func (server *Server) GetReadiness(ctx context.Context,
	req *readinessv1.GetReadinessRequest,
) (*readinessv1.GetReadinessResponse, error) {
	if _, err := server.authorize(ctx, "GetReadiness", RoleReader); err != nil {
		return nil, err
	}
	size := int(min(cmp.Or(req.GetPageSize(), MaxVIPsPerMessage), MaxVIPsPerMessage))
	state := server.table.State()
	if token := req.GetPageToken(); token != "" {
		after, err := vip.Parse(token)
		if err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "page_token: %v", err)
		}
		rest := func(i int) bool { return vip.Compare(state.VIPs[i].VIP, after) > 0 }
		state.VIPs = state.VIPs[sort.Search(len(state.VIPs), rest):]
	}
	resp := &readinessv1.GetReadinessResponse{
		Position: state.Position.Proto(), Synced: state.Synced,
		Lease: durationpb.New(state.LeaseLeft), StaleGrace: server.table.staleGrace,
	}
	page := state.VIPs[:min(size, len(state.VIPs))]
	// Group the VIPs within the page: the next page begins after the highest VIP of this one.
	byReadiness := readinessGroups{now: time.Now()}
	for i := range page {
		byReadiness.add(page[i].VIP.String(), &page[i])
	}
	resp.Groups = byReadiness.messages
	if len(page) < len(state.VIPs) {
		resp.NextPageToken = page[len(page)-1].VIP.String()
	}
	return resp, nil
}

// Watchers describes the open watches, in the order of opening.
func (server *Server) Watchers() []WatcherInfo {
	server.mu.Lock()
	defer server.mu.Unlock()
	watches := slices.SortedFunc(maps.Values(server.watches), func(a, b *watch) int { return cmp.Compare(a.seq, b.seq) })
	infos := make([]WatcherInfo, 0, len(watches))
	for _, watch := range watches {
		info := watch.WatcherInfo
		info.SentRevision, info.Reporting = server.table.sent(watch.cursor), watch == server.reporting
		infos = append(infos, info)
	}
	return infos
}

// OpenStream authorizes a reader of another service on the same socket, and counts its stream until
// done is called. The handler must return after stopping is closed, which EndWatches does.
func (s *Server) OpenStream(ctx context.Context, method string) (
	id spiffeid.ID, done func(), stopping <-chan struct{}, err error,
) {
	id, done, err = s.openStream(ctx, method, RoleReader)
	return id, done, s.stop, err
}
