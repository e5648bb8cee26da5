package nsptest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// targets is the NSP's registry of targets.
type targets struct {
	timeout time.Duration
	list    latest.Value[[]*nspv1.Target] // replaced as a whole; its elements do not change

	mu      sync.Mutex
	running bool
	expiry  map[string]*time.Timer
}

func newTargets(timeout time.Duration) *targets {
	return &targets{timeout: timeout, expiry: map[string]*time.Timer{}}
}

// id returns the identity of a target: its addresses, type and stream, without context and
// status.
func id(t *nspv1.Target) string {
	ips := slices.Clone(t.GetIps())
	slices.Sort(ips)
	s := t.GetStream()
	return fmt.Sprintf("%s-%d-%s.%s.%s", strings.Join(ips, ";"), t.GetType(),
		s.GetName(), s.GetConduit().GetName(), s.GetConduit().GetTrench().GetName())
}

// restore gives each target of an earlier run a whole timeout, as the NSP does with its database.
func (t *targets) restore() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running = true
	for _, x := range t.list.Load() {
		t.renew(id(x))
	}
}

func (t *targets) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running = false
	for key, timer := range t.expiry {
		timer.Stop()
		delete(t.expiry, key)
	}
}

// renew starts the timeout of a target; the caller holds mu.
func (t *targets) renew(key string) {
	if timer := t.expiry[key]; timer != nil {
		timer.Stop()
	}
	var timer *time.Timer
	timer = time.AfterFunc(t.timeout, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.running && t.expiry[key] == timer {
			t.remove(key)
		}
	})
	t.expiry[key] = timer
}

// remove removes a target; the caller holds mu.
func (t *targets) remove(key string) {
	if timer := t.expiry[key]; timer != nil {
		timer.Stop()
		delete(t.expiry, key)
	}
	t.list.Update(func(list []*nspv1.Target) []*nspv1.Target {
		return slices.DeleteFunc(slices.Clone(list), func(x *nspv1.Target) bool { return id(x) == key })
	})
}

// set stores a target. One that is unknown is stored DISABLED.
func (t *targets) set(target *nspv1.Target) {
	key, target := id(target), proto.CloneOf(target)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.expiry[key] == nil {
		target.Status = nspv1.Target_DISABLED
	}
	t.renew(key)
	t.list.Update(func(list []*nspv1.Target) []*nspv1.Target {
		list = slices.Clone(list)
		if i := slices.IndexFunc(list, func(x *nspv1.Target) bool { return id(x) == key }); i >= 0 {
			list[i] = target
			return list
		}
		return append(list, target)
	})
}

// Targets returns the registered targets.
func (n *NSP) Targets() []*nspv1.Target { return n.targets.list.Load() }

// WaitTargets waits until the registered targets meet the condition, or ctx ends.
func (n *NSP) WaitTargets(ctx context.Context, met func([]*nspv1.Target) bool) error {
	if err := n.targets.list.Wait(ctx, met); err != nil {
		return fmt.Errorf("registered targets are %v: %w", n.Targets(), err)
	}
	return nil
}

// Forget removes all targets, as the loss of the NSP's database does.
func (n *NSP) Forget() {
	n.targets.mu.Lock()
	defer n.targets.mu.Unlock()
	for _, x := range n.targets.list.Load() {
		n.targets.remove(id(x))
	}
}

// matches reports whether a Watch with the filter lists the target.
func matches(filter, target *nspv1.Target) bool {
	if filter.GetStatus() != nspv1.Target_ANY && filter.GetStatus() != target.GetStatus() {
		return false
	}
	return filter.GetType() == target.GetType() && (filter.GetStream() == nil ||
		sameStream(filter.GetStream(), target.GetStream()))
}

func sameStream(filter, stream *nspv1.Stream) bool {
	if stream == nil || filter.GetName() != "" && filter.GetName() != stream.GetName() {
		return false
	}
	c := filter.GetConduit()
	if c == nil {
		return true
	}
	if stream.GetConduit() == nil || c.GetName() != "" && c.GetName() != stream.GetConduit().GetName() {
		return false
	}
	name := c.GetTrench().GetName()
	return name == "" || name == stream.GetConduit().GetTrench().GetName()
}

type targetRegistry struct {
	nspv1.UnimplementedTargetRegistryServer
	*NSP
}

// Register implements nsp.v1.
func (r *targetRegistry) Register(ctx context.Context, target *nspv1.Target) (*emptypb.Empty, error) {
	if err := r.behave(ctx, Request{Method: "Register", Target: target}); err != nil {
		return nil, err
	}
	r.targets.set(target)
	return &emptypb.Empty{}, nil
}

// Unregister implements nsp.v1. It succeeds if the target is not registered.
func (r *targetRegistry) Unregister(ctx context.Context, target *nspv1.Target) (*emptypb.Empty, error) {
	if err := r.behave(ctx, Request{Method: "Unregister", Target: target}); err != nil {
		return nil, err
	}
	r.targets.mu.Lock()
	defer r.targets.mu.Unlock()
	r.targets.remove(id(target))
	return &emptypb.Empty{}, nil
}

// Watch implements nsp.v1: it sends all matching targets first, and again on each change or
// renewal of any target.
func (r *targetRegistry) Watch(filter *nspv1.Target, stream grpc.ServerStreamingServer[nspv1.TargetResponse]) error {
	if err := r.behave(stream.Context(), Request{Method: "Watch", Target: filter}); err != nil {
		return err
	}
	for {
		all, changed := r.targets.list.Get()
		var found []*nspv1.Target
		for _, t := range all {
			if matches(filter, t) {
				found = append(found, t)
			}
		}
		if err := stream.Send(&nspv1.TargetResponse{Targets: found}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}
