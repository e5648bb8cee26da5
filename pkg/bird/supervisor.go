package bird

import (
	"context"
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

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Options configure a Supervisor.
type Options struct {
	Executable string // looked up when empty
	Dir        string // of the configuration
	Socket     string // control socket; its directory is made when missing
	RouterID   netip.Addr
	Interface  string // toward the gateways
	// LoopbackPort is where BIRD listens on 127.0.0.1 for the announcer, which
	// signs with Password unless that is empty.
	LoopbackPort   uint16
	Password       string
	TableID        uint32
	ECMP           bool
	KernelScanTime time.Duration
	LogBIRD        bool // BIRD's own lines at level info
	LogFileSize    int  // bytes of a log file of BIRD's own in Dir; 0: none
	Log            *slog.Logger
	// OnAnswer, when set, hears how long BIRD took to answer. It must not block.
	OnAnswer func(time.Duration)
}

// wanted is what Configure was given.
type wanted struct {
	gateways   []trench.Gateway
	vips       []vip.VIP
	generation uint64 // 0 before the first
}

// Supervisor runs BIRD. It implements task.Task.
type Supervisor struct {
	options Options
	wanted  *latest.Value[wanted]
	expect  *latest.Value[[len(vip.Families)]int]
	state   *latest.Value[State]
	ready   chan struct{}
	hint    chan struct{} // something happened in BIRD; conflating
	export  chan struct{} // routes are to be exported to the kernel again; conflating
	// confirming counts the calls of Confirm, which want frequent looks.
	confirming atomic.Int32
	surveyor   *surveyor
	dial       func(ctx context.Context, socket string) (*Client, error)

	// Owned by Run.
	announced bool // ready is closed
	apply     application
	client    *Client
	eager     eagerness
	holds     holdTimers
	silent    time.Time         // since when BIRD owes an answer; zero: it does not
	failures  map[string]string // the error that was logged last, by gateway
}

// NewSupervisor returns a supervisor, which does nothing before Run and starts
// BIRD once Configure was called.
func NewSupervisor(o Options) *Supervisor {
	if !o.RouterID.IsValid() {
		o.RouterID = RouterID()
	}
	if o.KernelScanTime == 0 {
		o.KernelScanTime = 10 * time.Second
	}
	o.Executable = Executable(o.Executable)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	w := latest.New(wanted{})
	return &Supervisor{
		options: o, wanted: w, surveyor: newSurveyor(o, w), expect: latest.New([len(vip.Families)]int{}), state: latest.New(State{}),
		failures: map[string]string{}, dial: Dial, ready: make(chan struct{}), hint: make(chan struct{}, 1), export: make(chan struct{}, 1),
	}
}

// Executable returns the path of BIRD: path, or where it is installed when path is empty.
func Executable(path string) string {
	if path != "" {
		return path
	}
	if path, err := exec.LookPath("bird"); err == nil {
		if abs, err := filepath.Abs(path); err == nil {
			return abs
		}
	}
	return "/usr/sbin/bird" // Debian's place, which is not in every PATH
}

// String implements task.Task.
func (s *Supervisor) String() string { return "BIRD" }

// Ready is closed when BIRD answered for the first time.
func (s *Supervisor) Ready() <-chan struct{} { return s.ready }

// State returns the state of BIRD and its sessions.
func (s *Supervisor) State() *latest.Value[State] { return s.state }

// Configure replaces gateways and VIPs. It does not block; the newest wins.
func (s *Supervisor) Configure(gateways []trench.Gateway, vips []vip.VIP) {
	s.wanted.Update(func(w wanted) wanted {
		return wanted{slices.Clone(gateways), slices.Clone(vips), w.generation + 1}
	})
}

// ExportRoutes has BIRD write the gateways' routes to the kernel again, which another
// process removed there. It does not block.
func (s *Supervisor) ExportRoutes() {
	select {
	case s.export <- struct{}{}:
	default:
	}
}

func (s *Supervisor) poke() {
	select {
	case s.hint <- struct{}{}:
	default:
	}
}

// event hears of every line that BIRD logs.
func (s *Supervisor) event(e Event) {
	if e.StateChanged() || e.Protocol == bfdName {
		s.poke()
	}
}

// Bounds of the wait before BIRD is started again.
const (
	minRestartWait = 100 * time.Millisecond
	maxRestartWait = 5 * time.Second
	goodRun        = 10 * time.Second
)

// Run keeps BIRD running until ctx ends, and then ends it and waits for its end.
func (s *Supervisor) Run(ctx context.Context) error {
	surveying, endSurveying := context.WithCancel(ctx)
	surveyor := make(chan struct{})
	go func() { defer close(surveyor); s.surveyor.run(surveying) }()
	defer func() { endSurveying(); <-surveyor }()

	v, changed := s.surveyor.result.Get()
	for v.generation == 0 {
		select {
		case <-changed:
			v, changed = s.surveyor.result.Get()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := os.MkdirAll(s.options.Dir, 0o755); err != nil {
		return fmt.Errorf("directory of BIRD's configuration: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.options.Socket), 0o755); err != nil {
		return fmt.Errorf("directory of BIRD's control socket: %w", err)
	}
	unlock, err := lockSocket(s.options.Socket)
	if err != nil {
		return err
	}
	defer unlock()
	if err := endOrphan(ctx, s.options.Executable, s.options.Socket, s.options.Log); err != nil {
		s.options.Log.Error("an orphan BIRD may still run", "error", err)
	}
	return s.keepRunning(ctx)
}

// keepRunning starts BIRD again whenever it ended.
func (s *Supervisor) keepRunning(ctx context.Context) error {
	wait := minRestartWait
	for starts := 0; ; starts++ {
		began := time.Now()
		err := s.runOnce(ctx, starts)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > goodRun {
			wait = minRestartWait
		}
		s.options.Log.Error("BIRD is not running; starting it again", "error", err, "wait", wait, "restarts", starts)
		s.publishDead(err, starts)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		wait = min(2*wait, maxRestartWait)
	}
}

// runOnce runs one BIRD until it ends, hangs for good, or ctx ends.
func (s *Supervisor) runOnce(ctx context.Context, starts int) error {
	if err := s.prepare(ctx); err != nil {
		return err
	}
	defer s.settle()
	p, err := startProcess(s.options.Executable, s.configPath(), s.options.Socket, s.options.Log, s.options.LogBIRD, s.event)
	if err != nil {
		return err
	}
	defer p.wait()
	s.options.Log.Info("BIRD started", "pid", p.pid())
	s.state.Update(func(st State) State {
		st.PID, st.Since, st.Restarts = p.pid(), p.since, starts
		return st
	})
	defer s.hangUp()
	err = s.serve(ctx, p)
	select {
	case <-p.exited:
		return p.ended()
	default:
	}
	if ctx.Err() != nil {
		p.terminate(s.options.Log)
		s.options.Log.Info("BIRD ended", "pid", p.pid())
		return ctx.Err()
	}
	p.kill()
	return err
}

// publishDead says that there is no BIRD.
func (s *Supervisor) publishDead(err error, restarts int) {
	now := time.Now()
	s.state.Update(func(st State) State {
		st.Alive, st.PID, st.Err, st.Restarts = false, 0, err, restarts
		st.Gateways = s.surveyor.result.Load().orphaned(now, st)
		return st
	})
}

// Input returns what the configuration should be made of now, without secrets,
// and why gateways are missing in it.
func (s *Supervisor) Input() (RenderInput, map[string]string) {
	v := s.surveyor.result.Load()
	if w := s.wanted.Load(); v.generation != w.generation {
		// Not running, or not that far.
		v, _ = newSurveyor(s.options, s.wanted).look(context.Background(), w, survey{})
	}
	return v.input.Masked(), maps.Clone(v.problems)
}
