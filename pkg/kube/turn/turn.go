package turn

import (
	"context"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/kube/frontendstatus"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

type timing struct {
	// lease, renew and retry configure the Lease.
	lease, renew, retry time.Duration
	// After silence without an answer about the Lease, the pod takes its turn without it, delayed by
	// slot times the number that its name has.
	silence, slot time.Duration
	// status bounds the wait for the frontend's first status, write the wait for the new trench file.
	status, write time.Duration
	// hold is the time for sessions to come back, and idle the time after which the change is over if
	// the frontend resets no session.
	hold, idle time.Duration
	probe      time.Duration // interval of the frontend's probes
}

// slots is the number of different delays without a Lease.
const slots = 8

func defaultTiming() timing {
	return timing{
		lease: 15 * time.Second, renew: 10 * time.Second, retry: time.Second,
		silence: 30 * time.Second, slot: 10 * time.Second, status: 2 * time.Second, write: 10 * time.Second,
		hold: 5 * time.Minute, idle: time.Minute, probe: 10 * time.Second,
	}
}

// Options configure a Taker. All are required.
type Options struct {
	Leases coordinationclient.LeasesGetter
	// Namespace and Trench name the Trench, Pod the Pod of this process, which holds the Lease.
	Namespace, Trench, Pod string
	// FrontendSocket is the path of the admin socket of the frontend in the same pod.
	FrontendSocket string
	Log            *slog.Logger
}

// Taker takes the turns of one pod. It implements task.Task. Create one with [New].
type Taker struct {
	options Options
	timing  timing
	waiting latest.Value[[]trench.Gateway] // whose change waits for a turn; empty if none waits
	granted latest.Value[bool]
}

// LeaseName returns a Trench's Lease, in its namespace. No leader's Lease begins with this name.
func LeaseName(trench string) string { return "turn-vipgate-" + trench }

// New returns a Taker.
func New(options Options) *Taker { return &Taker{options: options, timing: defaultTiming()} }

// String implements task.Task.
func (*Taker) String() string { return "turns" }

// Ask reports whether the pod has its turn for a change that resets the sessions of gateways, and
// returns a channel that is closed when that changes. The taker waits for a turn until Ask is
// called without gateways, because the change was written or withdrawn.
func (taker *Taker) Ask(gateways []trench.Gateway) (granted bool, changed <-chan struct{}) {
	if len(gateways) > 0 || len(taker.waiting.Load()) > 0 {
		taker.waiting.Set(gateways)
	}
	return taker.granted.Get()
}

// Run takes turns until ctx ends.
func (taker *Taker) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if taker.waiting.Wait(ctx, func(gateways []trench.Gateway) bool { return len(gateways) > 0 }) == nil {
			taker.turn(ctx)
		}
	}
	return ctx.Err()
}

func noneWaits(gateways []trench.Gateway) bool { return len(gateways) == 0 }

// turn waits for the turn of the pod, grants it, and ends it when the change is over. It returns
// early if the change is withdrawn.
func (taker *Taker) turn(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	log := taker.options.Log.With("gateways", names(taker.waiting.Load()))
	log.Info("the change resets the last session of a family: waiting for the turn of this pod")
	lock := taker.acquire(ctx)
	status, followed := taker.follow(ctx)
	// Release the Lease before the next turn begins.
	defer func() {
		cancel()
		<-lock.ended
		<-followed
	}()
	if !taker.await(ctx, lock) {
		return
	}
	families := familiesOf(taker.waiting.Load())
	before := taker.sessions(ctx, status, families)
	log.Info("the turn of this pod begins")
	taker.granted.Set(true)
	defer taker.granted.Set(false)

	writing, stop := context.WithTimeout(ctx, taker.timing.write)
	defer stop()
	// Without a session before the change, none is missing after it.
	if taker.waiting.Wait(writing, noneWaits) != nil || len(before) == 0 {
		return
	}
	if taker.over(ctx, status, before, families) {
		log.Info("the turn of this pod is over")
	} else if ctx.Err() == nil {
		log.Warn("sessions did not come back: the next pod takes its turn", "after", taker.timing.hold)
	}
}

func names(gateways []trench.Gateway) (all []string) {
	for _, gateway := range gateways {
		all = append(all, gateway.Name)
	}
	return all
}

// await waits for the Lease or, without an answer about it, for the delay of the pod. It reports
// false if no change waits any longer.
func (taker *Taker) await(ctx context.Context, lock *lock) bool {
	for {
		gateways, changed := taker.waiting.Get()
		if noneWaits(gateways) {
			return false
		}
		// Every answer postpones the turn without the Lease.
		alone := time.Until(lock.answered().Add(taker.timing.silence + taker.delay()))
		if alone <= 0 {
			taker.options.Log.Warn("no answer about the Lease: taking the turn without it",
				"lease", LeaseName(taker.options.Trench))
			return true
		}
		select {
		case <-lock.acquired:
			return true
		case <-time.After(alone):
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// delay returns the delay of the pod without a Lease: the same for one name at any time, different
// for two names with a probability of 1-1/slots.
func (taker *Taker) delay() time.Duration {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(taker.options.Pod)) // never fails
	return time.Duration(hash.Sum32()%slots) * taker.timing.slot
}

// follow follows the status of the frontend until ctx ends, and closes ended then. The status is
// nil while the frontend does not answer.
func (taker *Taker) follow(ctx context.Context) (status *latest.Value[*frontendv1.Status], ended chan struct{}) {
	status, ended = &latest.Value[*frontendv1.Status]{}, make(chan struct{})
	go func() {
		defer close(ended)
		_ = frontendstatus.Follow(ctx, taker.options.FrontendSocket, taker.timing.probe,
			func(s *frontendv1.Status, _ error) { status.Set(s) })
	}()
	return status, ended
}

// sessions returns the present sessions of families; none if the frontend does not answer.
func (taker *Taker) sessions(ctx context.Context, status *latest.Value[*frontendv1.Status],
	families map[vip.Family]bool,
) sessions {
	bound, cancel := context.WithTimeout(ctx, taker.timing.status)
	defer cancel()
	_ = status.Wait(bound, func(s *frontendv1.Status) bool { return s != nil })
	return sessionsOf(status.Load(), families)
}

// over waits until the sessions have been reset and are up again, or are still up although they
// should have been reset. It reports false at the end of the bound.
func (taker *Taker) over(ctx context.Context, status *latest.Value[*frontendv1.Status], before sessions,
	families map[vip.Family]bool,
) bool {
	ctx, cancel := context.WithTimeout(ctx, taker.timing.hold)
	defer cancel()
	idle := time.NewTicker(taker.timing.idle)
	defer idle.Stop()
	for {
		now, changed := status.Get()
		if before.restarted(sessionsOf(now, families)) {
			return true
		}
		select {
		case <-changed:
		case <-idle.C:
			if now := status.Load(); !now.GetGatewayChange() && before.kept(sessionsOf(now, families)) {
				return true
			}
		case <-ctx.Done():
			return false
		}
	}
}

// sessions maps a family to the time since which its session is up, and lacks those without one.
type sessions map[vip.Family]time.Time

// sessionsOf returns the sessions of families; none if the status is unknown.
func sessionsOf(status *frontendv1.Status, families map[vip.Family]bool) sessions {
	all := sessions{}
	for _, gateway := range status.GetGateways() {
		// A session that lacks exports does not carry its VIPs yet.
		if !gateway.GetUp() || gateway.GetExported() < gateway.GetExpected() {
			continue
		}
		for family := range families {
			own := gateway.GetFamily()
			if address, err := netip.ParseAddr(gateway.GetAddress()); own == "" && err == nil {
				own = vip.FamilyOf(address).String() // an older frontend
			}
			if own == family.String() {
				all[family] = gateway.GetSince().AsTime()
			}
		}
	}
	return all
}

func familiesOf(gateways []trench.Gateway) map[vip.Family]bool {
	families := map[vip.Family]bool{}
	for _, gateway := range gateways {
		for _, family := range gateway.FamilyList() {
			families[family] = true
		}
	}
	return families
}

// restarted reports whether each session from before the change has been reset and is up again.
func (before sessions) restarted(now sessions) bool {
	for family, since := range before {
		if again, up := now[family]; !up || again.Equal(since) {
			return false
		}
	}
	return true
}

// kept reports whether each session from before the change is up and was not reset.
func (before sessions) kept(now sessions) bool {
	for family, since := range before {
		if again, up := now[family]; !up || !again.Equal(since) {
			return false
		}
	}
	return true
}

// lock is the Lease of one turn. It records when the API server last answered about it.
type lock struct {
	resourcelock.Interface
	acquired chan struct{} // closed when this process holds the Lease
	ended    chan struct{} // closed when this process no longer renews the Lease

	mu   sync.Mutex
	last time.Time
}

// acquire acquires the Lease and renews it until ctx ends.
func (taker *Taker) acquire(ctx context.Context) *lock {
	options := taker.options
	lock := &lock{
		Interface: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: options.Namespace, Name: LeaseName(options.Trench)},
			Client:     options.Leases,
			LockConfig: resourcelock.ResourceLockConfig{Identity: options.Pod},
		},
		acquired: make(chan struct{}), ended: make(chan struct{}), last: time.Now(),
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, Name: LeaseName(options.Trench), ReleaseOnCancel: true,
		LeaseDuration: taker.timing.lease, RenewDeadline: taker.timing.renew, RetryPeriod: taker.timing.retry,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { close(lock.acquired) },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		panic(err) // the durations are constants
	}
	go func() {
		defer close(lock.ended)
		elector.Run(ctx)
	}()
	return lock
}

// Get implements resourcelock.Interface.
func (lock *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := lock.Interface.Get(ctx)
	// A missing Lease is no answer: a server that refuses to create it would never let the pod have it.
	if err == nil {
		lock.mu.Lock()
		lock.last = time.Now()
		lock.mu.Unlock()
	}
	return record, raw, err
}

// answered returns the time of the last answer about the Lease.
func (lock *lock) answered() time.Time {
	lock.mu.Lock()
	defer lock.mu.Unlock()
	return lock.last
}
