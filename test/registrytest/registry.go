package registrytest

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// Registry serves targets of the streams "s" and "other", each ready as soon as it is offered, to
// the SPIFFE ID /app of the authority. Its own is /lb.
type Registry struct {
	*registry.Registry
	tb    testing.TB
	ca    *identitytest.CA
	index *targetset.Index
}

// New returns a registry that ends with the test. drainTime applies to stream "s".
func New(tb testing.TB, ca *identitytest.CA, drainTime time.Duration) *Registry {
	tb.Helper()
	allowance, err := registry.ParseAllowance(ca.ID("/app").String())
	harness.Must(tb, err)
	r := &Registry{
		Registry: registry.New(registry.Options{
			Allow: registry.Allowances{allowance}, Grace: time.Minute, OnGone: targetset.Drain,
		}),
		tb: tb, ca: ca, index: targetset.NewIndex(),
	}
	check := trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1,
		},
	}
	r.Configure([]trench.Stream{{Name: "s", Check: check, DrainTime: drainTime}, {Name: "other", Check: check}},
		targetset.AddressPolicy{})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		harness.Check(tb, task.Guard(ctx, r.String(), r.Run))
	})
	running.Go(func() { r.publish(ctx) })
	tb.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return r
}

// Serve serves the operator over plaintext, or applications over mTLS, until stop or the end of the
// test. It returns the address.
func (r *Registry) Serve(network, address string, operator bool, services ...func(grpc.ServiceRegistrar),
) (bound string, stop func()) {
	r.tb.Helper()
	l, err := lab.Listen(network, address)
	harness.Must(r.tb, err)
	creds := insecure.NewCredentials()
	if !operator {
		creds = identity.NewCredentials(r.ca.Source(r.ca.SVID(r.ca.ID("/lb"), time.Hour)),
			identity.CredentialOptions{Authorize: func(id spiffeid.ID, _ [][]*x509.Certificate) error {
				if r.Allow.Authorizes(id) {
					return nil
				}
				return errors.New("it is unknown")
			}})
	}
	server := grpc.NewServer(append(registry.GRPCOptions(), grpc.Creds(creds))...)
	targetv1.RegisterTargetServiceServer(server, &registry.Service{
		Registry: r.Registry, Index: r.index, Operator: operator, Log: slog.New(slog.DiscardHandler),
	})
	for _, register := range services {
		register(server)
	}
	return l.Addr().String(), harness.Serve(r.tb, server, l)
}

// States returns the states of all addresses of all targets.
func (r *Registry) States() (states []healthcheck.State) {
	for _, v := range r.index.List(nil) {
		states = append(states, v.State)
	}
	return states
}

// publish copies the registry's targets into the index.
func (r *Registry) publish(ctx context.Context) {
	known := map[string]map[healthcheck.Key]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.Changed():
		}
		var changed []targetset.View
		var removed []healthcheck.Key
		for stream, offers := range r.Take() {
			now := map[healthcheck.Key]bool{}
			for _, o := range offers {
				for _, ip := range o.IPs {
					v := targetset.View{Health: healthcheck.Health{
						Key:   healthcheck.Key{Stream: stream, Name: o.Name, Addr: ip},
						State: healthcheck.Ready, Since: time.Now(),
					}, Origins: targetset.OriginSet(0).With(targetset.OriginRegistry), Owner: o.Owner}
					if o.Lifecycle == targetset.Terminating {
						v.State, v.DrainEnd, v.DrainCause = healthcheck.Draining, o.DrainEnd, o.Cause
					}
					now[v.Key] = true
					changed = append(changed, v)
				}
			}
			for k := range known[stream] {
				if !now[k] {
					removed = append(removed, k)
				}
			}
			known[stream] = now
		}
		r.index.Publish(changed, removed)
	}
}
