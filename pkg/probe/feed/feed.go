// Package feed reports the verdicts of a probe to load balancers, over mTLS: it is the client of
// vipgate.probe.v1.
//
// Each load balancer behind a name gets reports of its own, and a report always has the newest
// verdicts: a load balancer that hangs or is down delays no other one.
package feed

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/probe"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

const (
	// callTimeout bounds a report. It is shorter than the lease.
	callTimeout = 2 * time.Second
	// minGap is the shortest time between two reports, so that changes are reported together.
	minGap = 200 * time.Millisecond
	// reportsPerLease is how many reports a lease spans.
	reportsPerLease = 3
	maxLease        = time.Minute
	minBackoff      = 100 * time.Millisecond
	maxBackoff      = 2 * time.Second
)

// Options configure a Feed. Every field is required.
type Options struct {
	Prober *probe.Prober
	// LBs lists addresses of load balancers, and names that resolve to several.
	LBs []registration.Address
	// Source supplies the SVID. The caller runs it.
	Source *identity.Source
	LB     spiffeid.ID // of all load balancers
	Log    *slog.Logger
}

// Feed reports verdicts. It implements task.Task.
type Feed struct {
	Options
	instance string
	verdicts *latest.Value[uint64] // counts changes
	running  sync.WaitGroup

	mu      sync.Mutex
	members map[string]*member // by address
}

// member is one load balancer. Feed.mu guards its last fields.
type member struct {
	address registration.Address
	from    string
	cancel  context.CancelFunc

	reporting bool
	failures  uint64
}

// New returns a Feed.
func New(options Options) *Feed {
	return &Feed{Options: options, instance: rand.Text(), verdicts: latest.New(uint64(0)), members: map[string]*member{}}
}

// String implements task.Task.
func (feed *Feed) String() string { return "feed of verdicts" }

// Run reports until ctx ends.
func (feed *Feed) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer feed.running.Wait()
	defer cancel()
	// Lookups start members, so they end before the wait for members.
	var names sync.WaitGroup
	defer names.Wait()
	defer cancel()
	for _, address := range feed.LBs {
		names.Go(func() {
			registration.Follow(ctx, address, net.DefaultResolver,
				func(found []registration.Address) { feed.update(ctx, address.String(), found) },
				func(err error) {
					feed.Log.Warn("load balancers kept: lookup failed", "name", address.String(), "error", err)
				})
		})
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-feed.Prober.Changed():
			feed.verdicts.Update(func(n uint64) uint64 { return n + 1 })
		}
	}
}

// update begins reports to new addresses of a name, and ends them at addresses that it lost.
func (feed *Feed) update(ctx context.Context, name string, found []registration.Address) {
	feed.mu.Lock()
	defer feed.mu.Unlock()
	for key, member := range feed.members {
		if member.from == name && !slices.Contains(found, member.address) {
			member.cancel()
			delete(feed.members, key)
		}
	}
	for _, address := range found {
		key := address.String()
		if feed.members[key] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		added := &member{address: address, from: name, cancel: cancel}
		feed.members[key] = added
		feed.running.Go(func() {
			defer cancel()
			if err := feed.follow(ctx, added); err != nil {
				feed.Log.Error("no verdicts are reported", "lb", key, "error", err)
			}
		})
	}
}

// follow reports to one load balancer until ctx ends.
func (feed *Feed) follow(ctx context.Context, member *member) error {
	conn, err := registration.Dial(member.address, feed.Source, feed.LB)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := probev1.NewProbeServiceClient(conn)
	retry := backoff.Backoff{Min: minBackoff, Max: maxBackoff, Jitter: 0.2}
	failure := ""
	for {
		_, changed := feed.verdicts.Get()
		call, cancel := context.WithTimeout(ctx, callTimeout)
		response, err := client.Report(call, feed.report(time.Now()))
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		feed.note(member, err)
		if err != nil {
			if reason := grpcstatus.Convert(conn.Explain(err)).Message(); reason != failure {
				failure = reason
				feed.Log.Warn("verdicts are not accepted, retrying", "lb", member.address.String(), "error", reason)
			}
			if retry.Wait(ctx) != nil {
				return nil
			}
			conn.ResetConnectBackoff() // otherwise the next call waits for gRPC's own back-off
			continue
		}
		failure = ""
		retry.Reset()
		if backoff.Sleep(ctx, minGap) != nil {
			return nil
		}
		next := time.After(min(response.GetLease().AsDuration(), maxLease)/reportsPerLease - minGap)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-next:
		}
	}
}

func (feed *Feed) note(member *member, err error) {
	feed.mu.Lock()
	defer feed.mu.Unlock()
	if err == nil && !member.reporting {
		feed.Log.Info("verdicts are accepted", "lb", member.address.String())
	}
	if member.reporting = err == nil; err != nil {
		member.failures++
	}
}

// Status is the state of the reports to one load balancer.
type Status struct {
	LB        string
	Reporting bool
	Failures  uint64
}

// Status returns the state at each load balancer, sorted by address.
func (feed *Feed) Status() []Status {
	feed.mu.Lock()
	defer feed.mu.Unlock()
	all := make([]Status, 0, len(feed.members))
	for key, member := range feed.members {
		all = append(all, Status{key, member.reporting, member.failures})
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.LB, b.LB) })
	return all
}

func (feed *Feed) report(now time.Time) *probev1.ReportRequest {
	request := &probev1.ReportRequest{Instance: feed.instance, Round: durationpb.New(feed.Prober.Valid())}
	for _, v := range feed.Prober.Report(now).VIPs {
		verdict := &probev1.VipVerdict{Vip: v.VIP.String()}
		bySource := map[netip.Addr]*probev1.SourceVerdict{}
		for _, path := range v.Paths {
			if path.State == probe.Unknown {
				continue
			}
			from, err := netip.ParseAddrPort(path.Source)
			if err != nil {
				continue // Report wrote it
			}
			address := from.Addr()
			if address.IsUnspecified() {
				address, _ = rtnetlink.SourceToward(v.VIP.Prefix().Addr())
			}
			if !address.IsValid() {
				continue
			}
			source := bySource[address]
			if source == nil {
				source = &probev1.SourceVerdict{Address: address.String()}
				bySource[address] = source
				verdict.Sources = append(verdict.Sources, source)
			}
			if path.State == probe.Dead {
				source.DeadPorts = append(source.DeadPorts, uint32(from.Port()))
			} else {
				source.ReachablePorts = append(source.ReachablePorts, uint32(from.Port()))
			}
		}
		if len(verdict.Sources) > 0 {
			request.Vips = append(request.Vips, verdict)
		}
	}
	return request
}
