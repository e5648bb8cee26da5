package bird

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/bird/orphan"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Options configure a Supervisor.
type Options struct {
	Executable string // empty: found by Executable
	Dir        string // directory of the configuration and the log file
	Socket     string // control socket; a missing directory is created
	RouterID   netip.Addr
	// LoopbackPort is BIRD's port on 127.0.0.1 for the announcer, which signs the session with
	// Password unless that is empty.
	LoopbackPort uint16
	Password     string
	// LoopbackHoldTime is the hold time of that session in whole seconds. Default: 3 s, the minimum.
	LoopbackHoldTime time.Duration
	TableID          uint32
	ECMP             bool
	// VRRP lists the next hops of static default routes. If set, gateways' routes are not imported.
	VRRP []netip.Addr
	// ImportAll imports all routes of gateways except VIPs, not only default routes.
	ImportAll bool
	// ImportLimit bounds the routes imported from one gateway. Default: DefaultImportLimit.
	ImportLimit    uint32
	KernelScanTime time.Duration
	LogBIRD        bool   // log all of BIRD's lines at info
	LogFileSize    int    // bytes of BIRD's log file; 0: no file
	LogFile        string // empty: bird.log in Dir
	Log            *slog.Logger
	// DrainTime is the time for gateways to move traffic before their session restarts or ends.
	DrainTime time.Duration
	// SlotTime is the time of one pod to restart the only session of a family; 0: no wait for other
	// pods. Ordered, if set, reports whether another program lets one pod after another change; pods
	// then have no slots. It must not block.
	SlotTime time.Duration
	Ordered  func() bool
	// OnAnswer, if set, is called with the latency of each answer of BIRD. It must not block.
	OnAnswer func(time.Duration)
	// ExplainPassword, if set, returns why a password file does not exist, or "". It must not block.
	ExplainPassword func(file string) string
}

// Silence returns how long BIRD may leave requests unanswered: after it, its sessions count as down.
func (o Options) Silence() time.Duration { return cmp.Or(o.LoopbackHoldTime, minHoldTime) * 2 / 3 }

type desired struct {
	attractor  trench.Attractor
	exports    map[string]Export // by gateway; absent: ExportFull
	immediate  bool              // no drains and turns until the next Configure
	generation uint64            // 0 before the first
}

// Supervisor runs BIRD. It implements task.Task.
type Supervisor struct {
	options Options
	file    configFile
	desired *latest.Value[desired]
	expect  *latest.Value[[len(vip.Families)]int]
	state   *latest.Value[State]
	hint    chan struct{} // poll BIRD now; coalesced
	export  chan struct{} // re-export routes to the kernel; coalesced
	// sessionUp holds a token after a gateway session came up; coalesced.
	sessionUp chan struct{}
	noDelay   atomic.Pointer[noDelay]
	errors    sessionErrors
	// confirming counts the running calls of Confirm. While positive, BIRD is polled at fastInterval.
	confirming atomic.Int32
	lease      *bfdlease.Lease // of the BFD sessions of static gateways
	resolver   *resolver
	dial       func(ctx context.Context, socket string) (*Client, error)

	pulse task.Pulse

	// Owned by Run.
	apply           applyState
	process         *process
	client          *Client
	fast            fastPoll
	holds           holdTimers
	imports         imports
	missing         missing
	sockets         retries               // attempts to open BIRD's listening sockets
	unansweredSince time.Time             // start of the oldest unanswered command; zero without one
	failures        map[sessionKey]string // last logged error
	bfdStates       map[netip.Addr]string // of BFD sessions, at bfdAt
	bfdAt           time.Time
}

func (options Options) withDefaults() Options {
	if !options.RouterID.IsValid() {
		options.RouterID = RouterID()
	}
	options.KernelScanTime, options.Log = cmp.Or(options.KernelScanTime, 10*time.Second),
		cmp.Or(options.Log, slog.New(slog.DiscardHandler))
	options.Executable, options.ImportLimit = Executable(options.Executable),
		cmp.Or(options.ImportLimit, DefaultImportLimit)
	return options
}

// NewSupervisor returns a supervisor. Run starts BIRD after the first call of Configure.
func NewSupervisor(options Options) *Supervisor {
	options = options.withDefaults()
	w := latest.New(desired{})
	resolver := newResolver(options, w)
	return &Supervisor{
		options: options, file: configFile{filepath.Join(options.Dir, "vipgate.conf"), options.Executable},
		desired: w, resolver: resolver, dial: Dial,
		lease:  bfdlease.New(options.Log),
		expect: latest.New([len(vip.Families)]int{}), state: resolver.state, failures: map[sessionKey]string{},
		hint: make(chan struct{}, 1), export: make(chan struct{}, 1), sessionUp: make(chan struct{}, 1),
	}
}

// Executable returns path, or the path of the installed BIRD if path is empty.
func Executable(path string) string {
	if path != "" {
		return path
	}
	if path, err := exec.LookPath("bird"); err == nil {
		return path
	}
	return "/usr/sbin/bird" // Debian's path, which is not in every PATH
}

// String implements task.Task.
func (supervisor *Supervisor) String() string { return "BIRD" }

// Overdue implements task.Loop, also for the loop that reads addresses and passwords.
func (supervisor *Supervisor) Overdue() time.Duration {
	return max(supervisor.pulse.Overdue(), supervisor.resolver.pulse.Overdue())
}

// State returns the state of BIRD and its sessions.
func (supervisor *Supervisor) State() *latest.Value[State] { return supervisor.state }

// Configure replaces gateways and VIPs. It does not block.
func (supervisor *Supervisor) Configure(a trench.Attractor) {
	supervisor.desired.Update(func(w desired) desired {
		return desired{attractor: a, exports: w.exports, generation: w.generation + 1}
	})
}

// ApplyNow ends drains of gateways that leave, and restarts sessions that wait, without blocking.
func (supervisor *Supervisor) ApplyNow() {
	supervisor.desired.Update(func(w desired) desired {
		if w.generation > 0 {
			w.immediate, w.generation = true, w.generation+1
		}
		return w
	})
}

// Export replaces the exports that are not ExportFull, by gateway. Gateways that are not configured
// yet are kept for later. It does not block, and before Configure it starts nothing. The map must
// not be modified afterwards.
func (supervisor *Supervisor) Export(exports map[string]Export) {
	supervisor.desired.Update(func(w desired) desired {
		if w.generation > 0 && !maps.Equal(w.exports, exports) {
			w.generation++
		}
		w.exports = exports
		return w
	})
}

// Attract orders the families in which static gateways with BFD attract traffic. BFD sessions of
// the ordered families are released; the remaining BFD sessions of static gateways are held down.
// Attract does not block. Each call is also a heartbeat: the lease of an order older than a
// second is not refreshed, and the sessions go down when the lease in the kernel expires.
func (supervisor *Supervisor) Attract(now time.Time, families [len(vip.Families)]bool) {
	supervisor.lease.Attract(now, families)
}

// ExportRoutes makes BIRD export the gateways' routes to the kernel again, after another process
// has removed them. It does not block.
func (supervisor *Supervisor) ExportRoutes() { latest.Wake(supervisor.export) }

func (supervisor *Supervisor) trigger() { latest.Wake(supervisor.hint) }

func (supervisor *Supervisor) event(event stateEvent) {
	supervisor.errors.logged(event, time.Now())
	if event.Text == stateChanged+"up" && strings.HasPrefix(event.Protocol, gatewayPrefix) {
		latest.Wake(supervisor.sessionUp) // before the poll: BIRD sends the gateway's UPDATEs immediately
	}
	if event.StateChanged() || event.Protocol == bfdName {
		supervisor.trigger()
	}
}

// goodRun is the run time after which the wait before a restart is short again.
const goodRun = 10 * time.Second

// Run keeps BIRD running until ctx ends, and then terminates it and waits for its exit.
func (supervisor *Supervisor) Run(ctx context.Context) error {
	resolveCtx, stopResolving := context.WithCancel(ctx)
	resolver := make(chan struct{})
	go func() { defer close(resolver); supervisor.resolver.run(resolveCtx) }()
	defer func() { stopResolving(); <-resolver }()

	if err := supervisor.resolver.result.Wait(ctx, func(v resolution) bool { return v.generation > 0 }); err != nil {
		return err
	}
	supervisor.pulse.Next(0)
	defer supervisor.pulse.End()
	for _, dir := range []string{supervisor.options.Dir, filepath.Dir(supervisor.options.Socket)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("failed to create directory for BIRD: %w", err)
		}
	}
	unlock, err := orphan.Lock(supervisor.options.Socket)
	if err != nil {
		return err
	}
	defer unlock()
	if err := orphan.Terminate(ctx, supervisor.options.Executable, supervisor.options.Socket,
		supervisor.options.Log); err != nil {
		supervisor.options.Log.Error("failed to terminate BIRD of an earlier run", "error", err)
	}
	// The lease outlives BIRD, because BIRD's BFD packets depend on it: deferred calls run in reverse.
	leaseCtx, endLease := context.WithCancel(context.WithoutCancel(ctx))
	lease := make(chan error, 1)
	go func() { lease <- supervisor.lease.Run(leaseCtx) }()
	defer func() { endLease(); <-lease }()
	return supervisor.keepRunning(ctx)
}

// keepRunning restarts BIRD with back-off whenever it exits or hangs.
func (supervisor *Supervisor) keepRunning(ctx context.Context) error {
	delay := backoff.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	for starts := 0; ; starts++ {
		began := time.Now()
		supervisor.pulse.Next(0)
		err := supervisor.runOnce(ctx, starts)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > goodRun {
			delay.Reset()
		}
		wait := delay.Next()
		supervisor.options.Log.Error("BIRD is not running; restarting it", "error", err, "wait", wait, "restarts", starts)
		supervisor.state.Update(func(state State) State {
			state.Alive, state.PID, state.Err, state.Restarts = false, 0, err, starts
			state.Gateways = supervisor.resolver.result.Load().states(time.Now(), nil, nil,
				supervisor.lease.State().Load(), state)
			return state
		})
		supervisor.pulse.Next(wait)
		if err := backoff.Sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// runOnce runs one BIRD process until it exits, hangs or ctx ends.
func (supervisor *Supervisor) runOnce(ctx context.Context, starts int) error {
	err := supervisor.prepare(ctx)
	if err == nil {
		err = supervisor.holdable(ctx, supervisor.apply.current.input.heldDown())
	}
	if err != nil {
		return err
	}
	supervisor.pulse.Next(0)
	defer supervisor.apply.awaitWrite()
	options := supervisor.options
	process, err := startProcess(ctx, options.Executable, supervisor.file.path, options.Socket, options.Log,
		options.LogBIRD, supervisor.event)
	if err != nil {
		return err
	}
	defer process.wait()
	process.running.Go(func() { supervisor.keepNoDelay(process) })
	options.Log.Info("BIRD started", "pid", process.pid())
	supervisor.state.Update(func(state State) State {
		state.PID, state.Since, state.Restarts = process.pid(), process.since, starts
		return state
	})
	defer supervisor.disconnect()
	err = supervisor.serve(ctx, process)
	// An exit explains the error of the control socket that usually comes with it.
	select {
	case <-process.exited:
		return process.ended()
	default:
	}
	if ctx.Err() != nil {
		// SIGTERM acts as "down", which closes the sessions. A BIRD that hangs is killed.
		process.terminate(options.Log)
		options.Log.Info("BIRD exited", "pid", process.pid())
		return ctx.Err()
	}
	process.kill()
	return err
}

// Preview returns the configuration that a supervisor would load now, without secrets, and maps
// each gateway without a session to its problem.
func (options Options) Preview(a trench.Attractor) ([]byte, map[string]string, error) {
	r := newResolver(options.withDefaults(), nil)
	v, _ := r.resolve(context.Background(), desired{attractor: a, generation: 1}, State{}, resolution{})
	content, err := render(v.input.Masked())
	return content, v.problems, err
}

// RouterID derives a BGP router ID from the pod's UID (POD_UID) or else the machine ID, and the
// host name. BIRD fails to start without one on a host that has no IPv4 address.
func RouterID() netip.Addr {
	seed := os.Getenv("POD_UID")
	if seed == "" {
		if b, err := os.ReadFile("/etc/machine-id"); err == nil {
			seed = string(b)
		}
	}
	if name, err := os.Hostname(); err == nil {
		seed += name
	}
	sum := sha256.Sum256([]byte("vipgate router id " + seed))
	// Avoid 0.0.0.0 (RFC 6286) and addresses that look like loopback or multicast addresses.
	return netip.AddrFrom4([4]byte{1 + sum[0]%126, sum[1], sum[2], sum[3] | 1})
}
