package registry

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

// fixture is a served registry with an index. Like the load balancer's loop, it updates the index
// from the offers, and every offered target is immediately ready.
type fixture struct {
	*Registry
	t     *testing.T
	ca    *identitytest.CA
	index *targetset.Index
	log   *harness.Log
	// unix, tcp and admin are the addresses of the servers.
	unix, tcp, admin string
	server           *identity.Source
	stop             func()
}

var serverID = spiffeid.RequireFromString("spiffe://example.org/lb")

func newFixture(t *testing.T, o Options) *fixture {
	t.Helper()
	ca := identitytest.NewCA(t, "example.org")
	h := &fixture{t: t, ca: ca, index: targetset.NewIndex(), log: &harness.Log{}}
	log := slog.New(slog.NewTextHandler(h.log, nil))
	o.Allow, o.Log = allowances(t, "s=spiffe://example.org/ns/*/sa/*", "other="+bob.String()), log
	h.Registry = New(o)
	h.Configure(testStreams, targetset.AddressPolicy{})
	h.server = ca.Source(ca.SVID(serverID, time.Hour))
	reader := ca.ID("/operator")
	creds := identity.NewCredentials(h.server,
		identity.CredentialOptions{Log: log, Authorize: func(id spiffeid.ID, _ [][]*x509.Certificate) error {
			if id != reader && !h.Allow.Authorizes(id) {
				return fmt.Errorf("the peer is %s", id)
			}
			return nil
		}})
	peers := &Service{
		Registry: h.Registry, Index: h.index,
		Reader: func(id spiffeid.ID) bool { return id == reader }, Log: log,
	}
	operators := &Service{Registry: h.Registry, Index: h.index, Operator: true, Log: log}
	dir := identitytest.ShortDir(t)
	h.unix, h.tcp = h.serve("unix", filepath.Join(dir, "t.sock"), peers, creds),
		h.serve("tcp", "127.0.0.1:0", peers, creds)
	h.admin = h.serve("unix", filepath.Join(dir, "a.sock"), operators, insecure.NewCredentials())
	harness.Run(t, h.loop)
	h.stop = harness.Run(t, func(ctx context.Context) error { return task.Guard(ctx, h.String(), h.Run) })
	<-h.Ready()
	return h
}

func (h *fixture) serve(network, address string, s *Service, creds credentials.TransportCredentials) string {
	h.t.Helper()
	l, err := net.Listen(network, address)
	harness.Must(h.t, err)
	server := grpc.NewServer(append(GRPCOptions(), grpc.Creds(creds))...)
	targetv1.RegisterTargetServiceServer(server, s)
	harness.Serve(h.t, server, l)
	if network == "unix" {
		return "unix:" + address
	}
	return l.Addr().String()
}

// loop publishes the offers, as the load balancer's loop does.
func (h *fixture) loop(ctx context.Context) error {
	known := map[string]map[healthcheck.Key]struct{}{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.Changed():
		}
		var changed []targetset.View
		var removed []healthcheck.Key
		for stream, offers := range h.Take() {
			now := map[healthcheck.Key]struct{}{}
			for _, o := range offers {
				for _, ip := range o.IPs {
					v := targetset.View{
						Health: healthcheck.Health{Key: healthcheck.Key{
							Stream: stream, Name: o.Name,
							Addr: ip,
						}, State: healthcheck.Ready}, Checks: healthcheck.Ready,
						Origins: targetset.OriginSet(0).With(targetset.OriginRegistry), Owner: o.Owner,
					}
					if o.Lifecycle != targetset.Active {
						v.State, v.DrainEnd, v.DrainCause = healthcheck.Draining, o.DrainEnd, o.Cause
					}
					now[v.Key] = struct{}{}
					changed = append(changed, v)
				}
			}
			for k := range known[stream] {
				if _, still := now[k]; !still {
					removed = append(removed, k)
				}
			}
			known[stream] = now
		}
		h.index.Publish(changed, removed)
	}
}

// dial connects with an ID, or as the operator on the admin socket.
func (h *fixture) dial(address string, id spiffeid.ID) (targetv1.TargetServiceClient, *grpc.ClientConn) {
	h.t.Helper()
	creds := insecure.NewCredentials()
	if address != h.admin {
		source := h.ca.Source(h.ca.SVID(id, time.Hour))
		creds = identity.NewCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(serverID)})
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	harness.Must(h.t, err)
	h.t.Cleanup(func() { _ = conn.Close() }) // may be closed already
	return targetv1.NewTargetServiceClient(conn), conn
}

// callTime bounds an openCall, which spans many waits.
const callTime = 5 * time.Minute

// openCall is an open Register call and its received states.
type openCall struct {
	t      *testing.T
	stream grpc.ServerStreamingClient[targetv1.RegisterResponse]
	end    context.CancelFunc
	grace  time.Duration
	states map[string]targetv1.State
}

func request(stream, targets string) *targetv1.RegisterRequest {
	r := &targetv1.RegisterRequest{Stream: stream}
	for word := range strings.FieldsSeq(targets) {
		name, addresses, _ := strings.Cut(word, "=")
		r.Targets = append(r.Targets, &targetv1.Target{Name: name, Addresses: strings.Split(addresses, ",")})
	}
	return r
}

func (h *fixture) register(c targetv1.TargetServiceClient, r *targetv1.RegisterRequest) (*openCall, error) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	h.t.Cleanup(cancel)
	stream, err := c.Register(ctx, r)
	harness.Must(h.t, err)
	l := &openCall{t: h.t, stream: stream, end: cancel, states: map[string]targetv1.State{}}
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if m.GetGrace() == nil || len(m.GetTargets()) == 0 {
		h.t.Fatalf("the first message is %v", m)
	}
	l.grace = m.GetGrace().AsDuration()
	l.note(m)
	return l, nil
}

func (h *fixture) mustRegister(c targetv1.TargetServiceClient, stream, targets string) *openCall {
	h.t.Helper()
	l, err := h.register(c, request(stream, targets))
	harness.Must(h.t, err)
	return l
}

func (l *openCall) note(m *targetv1.RegisterResponse) {
	for _, i := range m.GetTargets() {
		l.states[i.GetAddress()] = i.GetState()
	}
}

// until reads until the address is in the state.
func (l *openCall) until(address string, want targetv1.State) {
	l.t.Helper()
	for l.states[address] != want {
		m, err := l.stream.Recv()
		if err != nil {
			l.t.Fatalf("waiting for %s of %s: %v", want, address, err)
		}
		l.note(m)
	}
}

// over reads until the call ends.
func (l *openCall) over() error {
	for {
		m, err := l.stream.Recv()
		if err != nil {
			return err
		}
		l.note(m)
	}
}

const (
	isReady    = targetv1.State_STATE_READY
	isDraining = targetv1.State_STATE_DRAINING
	isGone     = targetv1.State_STATE_GONE
)
