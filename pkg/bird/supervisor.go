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
	"slices"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Options configure a Supervisor.
type Options struct {
	Executable string // empty: found by Executable
	Dir        string // of the configuration
	Socket     string // control socket; a missing directory is created
	RouterID   netip.Addr
	Interface  string // toward the gateways
	// LoopbackPort is BIRD's port on 127.0.0.1 for the announcer, which signs the session with
	// Password unless that is empty.
	LoopbackPort   uint16
	Password       string
	TableID        uint32
	ECMP           bool
	KernelScanTime time.Duration
	LogBIRD        bool // log all of BIRD's lines at info
	LogFileSize    int  // bytes of BIRD's log file in Dir; 0: no file
	Log            *slog.Logger
	// OnAnswer, if set, is called with the latency of each answer of BIRD. It must not block.
	OnAnswer func(time.Duration)
}

type desired struct {
	gateways   []trench.Gateway
	vips       []vip.VIP
	generation uint64 // 0 before the first
}

// Supervisor runs BIRD. It implements task.Task.
type Supervisor struct {
	options Options
	desired *latest.Value[desired]
	expect  *latest.Value[[len(vip.Families)]int]
	state   *latest.Value[State]
	ready   chan struct{}
	hint    chan struct{} // poll BIRD now; coalesced
	export  chan struct{} // re-export routes to the kernel; coalesced
	// confirming counts the calls of Confirm in progress: BIRD is polled at fastInterval.
	confirming atomic.Int32
	resolver   *resolver
	dial       func(ctx context.Context, socket string) (*Client, error)

	// Owned by Run.
	isReady         bool // ready is closed
	apply           applyState
	client          *Client
	fast            fastPoll
	holds           holdTimers
	sockets         retries           // of listening sockets that BIRD could not open
	unansweredSince time.Time         // start of the oldest command without an answer; zero: none
	failures        map[string]string // the last logged error, by gateway
}

// NewSupervisor returns a supervisor. Run starts BIRD after the first call of Configure.
func NewSupervisor(o Options) *Supervisor {
	if !o.RouterID.IsValid() {
		o.RouterID = RouterID()
	}
	o.KernelScanTime, o.Log = cmp.Or(o.KernelScanTime, 10*time.Second), cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Executable = Executable(o.Executable)
	w := latest.New(desired{})
	return &Supervisor{
		options: o, desired: w, resolver: newResolver(o, w), dial: Dial,
		expect: latest.New([len(vip.Families)]int{}), state: latest.New(State{}), failures: map[string]string{},
		ready: make(chan struct{}), hint: make(chan struct{}, 1), export: make(chan struct{}, 1),
	}
}

// Executable returns path, or the path of the installed BIRD if path is empty.
func Executable(path string) string {
	if path != "" {
		return path
	}
	if path, err := exec.LookPath("bird"); err == nil {
		if abs, err := filepath.Abs(path); err == nil {
			return abs
		}
	}
	return "/usr/sbin/bird" // Debian's path, which is not in every PATH
}

// String implements task.Task.
func (s *Supervisor) String() string { return "BIRD" }

// Ready is closed after BIRD's first answer.
func (s *Supervisor) Ready() <-chan struct{} { return s.ready }

// State returns the state of BIRD and its sessions.
func (s *Supervisor) State() *latest.Value[State] { return s.state }

// Configure replaces gateways and VIPs. It does not block.
func (s *Supervisor) Configure(gateways []trench.Gateway, vips []vip.VIP) {
	s.desired.Update(func(w desired) desired {
		return desired{slices.Clone(gateways), slices.Clone(vips), w.generation + 1}
	})
}

// ExportRoutes has BIRD re-export the gateways' routes, which another process removed from the
// kernel. It does not block.
func (s *Supervisor) ExportRoutes() { latest.Wake(s.export) }

func (s *Supervisor) trigger() { latest.Wake(s.hint) }

func (s *Supervisor) event(e Event) {
	if e.StateChanged() || e.Protocol == bfdName {
		s.trigger()
	}
}

// Bounds of the wait before BIRD is restarted.
const (
	minRestartWait = 100 * time.Millisecond
	maxRestartWait = 5 * time.Second
	goodRun        = 10 * time.Second
)

// Run keeps BIRD running until ctx ends, and then terminates it and waits for its exit.
func (s *Supervisor) Run(ctx context.Context) error {
	resolveCtx, stopResolving := context.WithCancel(ctx)
	resolver := make(chan struct{})
	go func() { defer close(resolver); s.resolver.run(resolveCtx) }()
	defer func() { stopResolving(); <-resolver }()

	if err := s.resolver.result.Wait(ctx, func(v resolution) bool { return v.generation > 0 }); err != nil {
		return err
	}
	for _, dir := range []string{s.options.Dir, filepath.Dir(s.options.Socket)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("failed to create directory for BIRD: %w", err)
		}
	}
	unlock, err := lockSocket(s.options.Socket)
	if err != nil {
		return err
	}
	defer unlock()
	if err := terminateOrphans(ctx, s.options.Executable, s.options.Socket, s.options.Log); err != nil {
		s.options.Log.Error("failed to terminate BIRD of an earlier run", "error", err)
	}
	return s.keepRunning(ctx)
}

// keepRunning restarts BIRD with back-off whenever it exits or hangs.
func (s *Supervisor) keepRunning(ctx context.Context) error {
	delay := backoff.Backoff{Min: minRestartWait, Max: maxRestartWait}
	for starts := 0; ; starts++ {
		began := time.Now()
		err := s.runOnce(ctx, starts)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > goodRun {
			delay.Reset()
		}
		wait := delay.Next()
		s.options.Log.Error("BIRD is not running; restarting it", "error", err, "wait", wait, "restarts", starts)
		s.publishDown(err, starts)
		if err := backoff.Sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// runOnce runs one BIRD process until it exits, hangs or ctx ends.
func (s *Supervisor) runOnce(ctx context.Context, starts int) error {
	if err := s.prepare(ctx); err != nil {
		return err
	}
	defer s.awaitWrite()
	o := s.options
	p, err := startProcess(o.Executable, s.configPath(), o.Socket, o.Log, o.LogBIRD, s.event)
	if err != nil {
		return err
	}
	defer p.wait()
	s.options.Log.Info("BIRD started", "pid", p.pid())
	s.state.Update(func(st State) State {
		st.PID, st.Since, st.Restarts = p.pid(), p.since, starts
		return st
	})
	defer s.disconnect()
	err = s.serve(ctx, p)
	select {
	case <-p.exited:
		return p.ended()
	default:
	}
	if ctx.Err() != nil {
		p.terminate(s.options.Log)
		s.options.Log.Info("BIRD exited", "pid", p.pid())
		return ctx.Err()
	}
	p.kill()
	return err
}

func (s *Supervisor) publishDown(err error, restarts int) {
	now := time.Now()
	s.state.Update(func(st State) State {
		st.Alive, st.PID, st.Err, st.Restarts = false, 0, err, restarts
		st.Gateways = s.resolver.result.Load().unreachable(now, st)
		return st
	})
}

// Input returns the input of the desired configuration without secrets, and by name the reason for
// each gateway without a session.
func (s *Supervisor) Input() (RenderInput, map[string]string) {
	v := s.resolver.result.Load()
	if w := s.desired.Load(); v.generation != w.generation {
		// Run has not resolved the newest input.
		v, _ = newResolver(s.options, s.desired).resolve(context.Background(), w, resolution{})
	}
	return v.input.Masked(), maps.Clone(v.problems)
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
	// Every value but 0.0.0.0 is allowed (RFC 6286). The first byte is below 127: the ID never
	// looks like a loopback or multicast address.
	return netip.AddrFrom4([4]byte{1 + sum[0]%126, sum[1], sum[2], sum[3] | 1})
}
