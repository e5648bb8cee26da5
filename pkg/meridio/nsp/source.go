package nsp

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
)

// Condition is the health service that shows whether the NSP confirms the configuration in force.
// The name is Meridio's.
const Condition = "NSPCli"

// SourceState is the state of the watch of the attractor.
type SourceState struct {
	// Connected reports whether a watch is open and has sent a list.
	Connected bool
	// FromCache reports whether the configuration in force comes from the cache.
	FromCache bool
	// Failures counts failed watches, CacheFailures failed accesses to the cache, since the start.
	Failures, CacheFailures uint64
	// Refused lists the refused objects of the list in force.
	Refused Refusals
}

// Source watches the attractor at the NSP. The last accepted configuration stays in force while
// the NSP is unreachable. It implements task.Task.
type Source struct {
	options Options
	cache   cache
	loaded  latest.Value[trench.Loaded]
	stale   latest.Value[*trench.Stale]
	state   latest.Value[SourceState]
	// confirmed has identifiers of held removals.
	confirmed latest.Value[string]
	first     time.Duration // firstListTimeout

	// The fields below are used by NewSource, and then only by Run.
	response              *nspv1.AttractorResponse // last response of the NSP
	list, accepted, saved *nspv1.Attractor         // last received, in force, and in the cache
	// current is the last time when the list was confirmed by the NSP; zero while a watch confirms it.
	current  time.Time
	failed   int // failed watches since the last list
	throttle logs.Throttle
}

var errNoList = errors.New("no list since the start")

// NewSource returns a source with the cached list in force, read within [files.Timeout].
func NewSource(options Options) *Source {
	options.Log = options.Log.With("component", "nsp", "nsp", options.Target)
	s := &Source{options: options, current: time.Now(), first: firstListTimeout}
	s.cache = cache{options: &s.options, failed: func() {
		s.change(func(state *SourceState) { state.CacheFailures++ })
	}}
	s.loaded.Set(trench.Loaded{
		Config: &trench.Config{Trench: options.Trench, Attractor: trench.Attractor{
			Name: options.Attractor, Interface: options.Defaults.Interface,
		}},
	})
	s.failed = 1 // no watch has sent a list yet, so report the first failure
	s.setStale(errNoList)
	list, received := s.cache.read()
	if list == nil {
		return s
	}
	if s.take(list); s.loaded.Load().Generation == 0 {
		return s // the version that wrote the cache had different rules
	}
	s.current = received
	s.change(func(state *SourceState) { state.FromCache = true })
	s.setStale(errNoList)
	options.Log.Warn("configuration taken from the cache until the NSP sends a list", "file", options.Cache,
		"received", received)
	return s
}

func (s *Source) change(apply func(*SourceState)) {
	s.state.Update(func(state SourceState) SourceState { apply(&state); return state })
}

// Value returns the configuration in force. Its Err names the refused objects, or is the reason
// why no configuration is in force.
func (s *Source) Value() *latest.Value[trench.Loaded] { return &s.loaded }

// Stale returns the time and reason since which the configuration in force may differ from the NSP.
func (s *Source) Stale() *latest.Value[*trench.Stale] { return &s.stale }

// Confirm puts the held removals in force, if the identifier is theirs or "". Without a watch it
// takes effect once one is open.
func (s *Source) Confirm(identifier string) (trench.Held, error) {
	return s.loaded.Load().Confirm(identifier, &s.confirmed)
}

// State returns the state of the watch.
func (s *Source) State() *latest.Value[SourceState] { return &s.state }

// String names the task.
func (s *Source) String() string { return "nsp-source" }

// Run watches the attractor until ctx ends.
func (s *Source) Run(ctx context.Context) error {
	conn, err := s.options.dial()
	if err != nil {
		return err
	}
	var writer sync.WaitGroup
	defer writer.Wait()
	defer conn.Close()
	writer.Go(func() { s.cache.run(ctx) })
	retry := backoff.Backoff{Min: minBackoff, Max: s.options.MaxBackoff, Jitter: 0.2}
	for {
		begun := time.Now()
		err := s.watch(ctx, conn)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// Do not reset the back-off for a watch that ends soon after its first list.
		if s.failed == 0 && time.Since(begun) > s.options.MaxBackoff {
			retry.Reset()
		}
		s.fail(err)
		if err := retry.Wait(ctx); err != nil {
			return err
		}
		conn.ResetConnectBackoff() // retry replaces the back-off of gRPC
	}
}

// watch takes lists until the watch ends, and returns the reason.
func (s *Source) watch(parent context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	late := fmt.Errorf("no list within %v", s.first)
	first := time.AfterFunc(s.first, func() { cancel(late) })
	defer first.Stop()
	// Read the stream in a goroutine, also during the conversion of a list: a stall blocks the NSP.
	received, ended := latest.New[*nspv1.AttractorResponse](nil), make(chan error, 1)
	go func() { ended <- s.read(ctx, conn, received) }()
	take := func() (changed <-chan struct{}) {
		response, changed := received.Get()
		if response != nil {
			first.Stop()
			s.connected()
			s.takeResponse(response)
		}
		return changed
	}
	changed := take()
	_, confirmed := s.confirmed.Get()
	s.retake() // the confirmation may have preceded the watch
	for {
		select {
		case <-confirmed:
			_, confirmed = s.confirmed.Get()
			s.retake()
		case <-changed:
			changed = take()
		case err := <-ended:
			take()
			if cause := context.Cause(ctx); cause != nil && parent.Err() == nil {
				return cause
			}
			return err
		}
	}
}

// read publishes the responses of a watch until it ends, and returns the reason.
func (s *Source) read(ctx context.Context, conn *grpc.ClientConn, to *latest.Value[*nspv1.AttractorResponse]) error {
	stream, err := nspv1.NewConfigurationManagerClient(conn).WatchAttractor(ctx,
		&nspv1.Attractor{Name: s.options.Attractor, Trench: &nspv1.Trench{Name: s.options.Trench}})
	for err == nil {
		var response *nspv1.AttractorResponse
		if response, err = stream.Recv(); err == nil {
			to.Set(response)
		}
	}
	return err
}

// takeResponse puts the attractor of a response in force, and passes it to the cache.
func (s *Source) takeResponse(response *nspv1.AttractorResponse) {
	if proto.Equal(response, s.response) { // the NSP repeats all lists after any change in the trench
		return
	}
	s.response = response
	if s.take(s.options.pick(response.GetAttractors())); s.accepted != s.saved {
		s.saved = s.accepted
		s.cache.write(s.saved)
	}
	if s.accepted == s.list {
		s.change(func(state *SourceState) { state.FromCache = false })
	}
}

// retake takes the last response again after a confirmation.
func (s *Source) retake() {
	if response := s.response; response != nil && s.confirmed.Load() != "" {
		s.response, s.list = nil, nil
		s.takeResponse(response)
	}
}

// connected publishes that the NSP confirms the list.
func (s *Source) connected() {
	s.failed = 0
	if s.current.IsZero() {
		return
	}
	if s.list == nil || s.stale.Load() != nil {
		s.options.Log.Info("NSP sent a list", "absent", time.Since(s.current).Round(time.Millisecond))
	}
	s.current = time.Time{}
	s.stale.Set(nil)
	s.change(func(state *SourceState) { state.Connected = true })
}

// fail counts a failed watch. It does not report the first failure after a list, because the
// watch of a reachable NSP is reopened immediately.
func (s *Source) fail(err error) {
	s.failed++
	s.change(func(state *SourceState) { state.Failures++ })
	if s.current.IsZero() {
		s.current = time.Now()
	}
	if s.failed < 2 {
		s.options.Log.Debug("watch of the NSP ended, opening it again", "error", err)
		return
	}
	s.change(func(state *SourceState) { state.Connected = false })
	reason := errors.New(reason(err))
	s.setStale(reason)
	s.throttle.Log(s.options.Log.Warn, reason.Error(), "watch of the NSP failed, retrying", "error", reason)
}

// setStale publishes why the NSP does not confirm the configuration in force.
func (s *Source) setStale(reason error) {
	cause := fmt.Sprintf("%s: %s", &s.options, reason)
	loaded := s.loaded.Load()
	if loaded.Generation == 0 {
		// No configuration is in force, and this is why.
		if logs.Text(loaded.Err) != cause {
			loaded.Err, loaded.At = errors.New(cause), time.Now()
			s.loaded.Set(loaded)
		}
	} else if s.state.Load().FromCache {
		cause += "; the list of " + s.options.Cache + " is in force"
	}
	if before := s.stale.Load(); before == nil || before.Cause != cause {
		s.stale.Set(&trench.Stale{Since: s.current, Cause: cause})
	}
}

// reason returns the error of a call as one short line.
func reason(err error) string {
	text := err.Error()
	if s, ok := grpcstatus.FromError(err); ok {
		text = health.Reason(err)
		if s.Code() == codes.Unimplemented {
			text = "it is not an NSP: " + text
		}
	}
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, short(text))
}

// take puts a list in force, unless it equals the last one.
func (s *Source) take(list *nspv1.Attractor) {
	if proto.Equal(list, s.list) { // reports false for nil
		return
	}
	s.list = list
	before := s.loaded.Load()
	loaded := before
	converted, err := s.options.convert(list)
	if err != nil {
		loaded.Err, loaded.Partial, loaded.At = err, false, time.Now()
		loaded.Refused++
		s.loaded.Set(loaded)
		s.options.Log.Error("list of the NSP refused, the old configuration stays in force", "error", err,
			"generation", loaded.Generation)
		return
	}
	s.refuse(converted.refused)
	config, gateways := converted.Config, list.GetGateways()
	if loaded.Held = (trench.Held{}); before.Generation > 0 {
		config, loaded.Held = change.Hold(before.Config, config, before.Held, s.confirmed.Load(), nil)
	}
	if loaded.Held.ID == "" {
		// The cache keeps an older list during a hold, so that a restart does not end the hold.
		s.accepted = list
		if before.Held.ID != "" {
			s.confirmed.Set("")
		}
	} else {
		gateways = slices.Concat(gateways, s.accepted.GetGateways())
	}
	if s.options.Keys != nil {
		s.options.Keys.Want(secrets(gateways, config))
	}
	loaded.Err, loaded.Partial = nil, len(converted.refused) > 0
	if loaded.Partial {
		loaded.Err = converted.refused
		loaded.Refused++
	}
	// An equal configuration must not disturb the sessions, even if other objects are refused.
	changed := before.Generation == 0 || !reflect.DeepEqual(config, before.Config)
	if changed {
		loaded.Config, loaded.Generation = config, before.Generation+1
		s.options.Log.Info("new configuration in force", "generation", loaded.Generation,
			"vips", len(config.Attractor.VIPs), "gateways", len(config.Attractor.Gateways),
			"refused", len(converted.refused))
	}
	if loaded.Held.ID != "" && loaded.Held.ID != before.Held.ID {
		s.options.Log.Error("removals held until they are confirmed", "id", loaded.Held.ID,
			"removals", loaded.Held.String(), "remedy", "correct the objects, or confirm")
	}
	if changed || logs.Text(before.Err) != logs.Text(loaded.Err) || loaded.Held.ID != before.Held.ID {
		loaded.At = time.Now()
		s.loaded.Set(loaded)
	}
}

// maxRefusalLines is the maximum number of log lines for one list; status shows all refusals.
const maxRefusalLines = 20

// refuse publishes the refused objects of a list, and logs new refusals.
func (s *Source) refuse(refused Refusals) {
	known := map[Refusal]bool{}
	for _, refusal := range s.state.Load().Refused {
		known[refusal] = true
	}
	logged := 0
	for _, refusal := range refused {
		if known[refusal] {
			continue
		}
		if logged++; logged > maxRefusalLines {
			s.options.Log.Error("more objects of the NSP refused; see frontend status", "refused", len(refused))
			break
		}
		s.options.Log.Error("object of the NSP refused, the others are in force", "kind", refusal.Kind,
			"name", quoteName(refusal.Name), "problem", refusal.Problem)
	}
	s.change(func(state *SourceState) { state.Refused = refused })
}
