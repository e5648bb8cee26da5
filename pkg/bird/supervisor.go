package bird

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// State is what is known of BIRD and its sessions.
type State struct {
	// At is when the look began that BIRD answered last; what is older than the
	// reader can bear counts for nothing.
	At time.Time
	// Alive is true while BIRD answers.
	Alive      bool
	Version    string
	PID        int
	Since      time.Time // of the process
	Restarts   int       // after the first start
	Configures uint64
	// Err says why BIRD does not answer, nil while it does. It is an [ErrHung]
	// when BIRD runs and is silent.
	Err error
	// ConfigErr says why BIRD's configuration is not the wanted one: the one
	// before is in force.
	ConfigErr error
	Gateways  []GatewayState
}

// ErrHung tells that BIRD runs but does not answer.
var ErrHung = errors.New("BIRD_HUNG")

// GatewayState is one configured gateway.
type GatewayState struct {
	Name     string
	Address  netip.Addr
	Family   vip.Family
	Up       bool
	Words    string    // the session's state in BIRD's words
	Since    time.Time // when Up last changed
	Imported int
	Exported int
	// LastError is the last error of the session.
	LastError string
	// BFD is the state of its BFD session, empty without.
	BFD string
	// Problem says why it has no session at all.
	Problem string
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
	asked   atomic.Int64  // a Confirm wants frequent looks until then (Unix ns)

	// Owned by Run.
	announced bool // ready is closed
	desired   rendered
	current   []byte // in force
	refused   []byte // by BIRD: not tried again
	apply     applyBackoff
	problems  map[string]string
	client    *Client
	eager     eagerness
	holds     holdTimers
	silent    time.Time // since when BIRD owes an answer; zero: it does not
}

// rendered is a configuration and what it was made of.
type rendered struct {
	generation uint64 // of wanted
	input      RenderInput
	content    []byte
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
	if o.Executable == "" {
		o.Executable = findExecutable()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Supervisor{
		options: o, wanted: latest.New(wanted{}), expect: latest.New([len(vip.Families)]int{}), state: latest.New(State{}),
		ready: make(chan struct{}), hint: make(chan struct{}, 1),
	}
}

func findExecutable() string {
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

// Expect tells how many VIPs of each family were announced to BIRD, so that it
// is watched closely until its sessions export as many.
func (s *Supervisor) Expect(announced4, announced6 int) {
	want := [len(vip.Families)]int{announced4, announced6}
	if s.expect.Load() != want {
		s.expect.Set(want)
	}
}

// Confirm waits until every gateway session that is up exports as many VIPs as
// Expect told last, as seen by a look that began after the call, and by the
// looks after it: a BIRD before 2.14 counts a route as exported before it
// writes the UPDATE, and needs to be woken to do so. A BIRD that does not run
// exports nothing. One call at a time.
func (s *Supervisor) Confirm(ctx context.Context) error {
	after := time.Now()
	if deadline, ok := ctx.Deadline(); ok {
		s.asked.Store(deadline.UnixNano())
		defer s.asked.Store(0)
	}
	s.poke()
	for seen := 0; ; {
		want, expected := s.expect.Get()
		state, looked := s.state.Get()
		switch {
		case state.PID == 0 && !state.Alive:
			return nil
		case !state.At.After(after):
		case !exports(state.Gateways, want):
			seen, after = 0, state.At
		default:
			seen, after = seen+1, state.At
		}
		if seen > eagerMore {
			return nil
		}
		select {
		case <-looked:
		case <-expected:
		case <-ctx.Done():
			return fmt.Errorf("gateway sessions do not export the expected routes (%d IPv4, %d IPv6): %w", want[vip.IPv4], want[vip.IPv6], ctx.Err())
		}
	}
}

// exports tells whether every session that is up exports what it should.
func exports(gateways []GatewayState, want [len(vip.Families)]int) bool {
	for _, g := range gateways {
		if g.Up && g.Exported != want[g.Family] {
			return false
		}
	}
	return true
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
	w, changed := s.wanted.Get()
	for w.generation == 0 {
		select {
		case <-changed:
			w, changed = s.wanted.Get()
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

// configPath is not bird.conf: on a host with a BIRD of its own, that is its file.
func (s *Supervisor) configPath() string { return filepath.Join(s.options.Dir, "vipgate.conf") }

// runOnce runs one BIRD until it ends, hangs for good, or ctx ends.
func (s *Supervisor) runOnce(ctx context.Context, starts int) error {
	if err := s.prepare(ctx); err != nil {
		return err
	}
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

// prepare writes the configuration for a BIRD that is to be started: the wanted
// one, or, if BIRD refuses that, the one that was in force before.
func (s *Supervisor) prepare(ctx context.Context) error {
	content, err := s.render()
	if err == nil && !bytes.Equal(content, s.current) {
		err = s.checkOffline(ctx, content)
	}
	if err != nil {
		if s.current == nil || ctx.Err() != nil {
			return err
		}
		s.configFailed(err)
		content = s.current
	}
	if err := replaceFile(s.configPath(), content, 0o600); err != nil {
		return err
	}
	s.current = content
	return nil
}

// checkOffline has BIRD parse a configuration without starting it.
func (s *Supervisor) checkOffline(ctx context.Context, content []byte) error {
	path := s.configPath() + ".check"
	if err := replaceFile(path, content, 0o600); err != nil {
		return err
	}
	defer os.Remove(path)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, s.options.Executable, "-p", "-c", path).CombinedOutput(); err != nil {
		return fmt.Errorf("BIRD refuses its configuration: %w: %s", err, out)
	}
	return nil
}

// render brings the configuration up to date. It makes the text anew only if
// something changed: it is called every second, and there may be many VIPs.
func (s *Supervisor) render() ([]byte, error) {
	w := s.wanted.Load()
	in, problems := s.inputNow(w)
	s.problems = problems
	if s.desired.content != nil && s.desired.generation == w.generation && slices.Equal(s.desired.input.Sessions, in.Sessions) {
		return s.desired.content, nil
	}
	content, err := Render(in)
	if err != nil {
		return nil, err
	}
	s.desired = rendered{w.generation, in, content}
	return content, nil
}

func (s *Supervisor) inputNow(w wanted) (RenderInput, map[string]string) {
	sessions, problems := resolve(w.gateways, s.options.Interface)
	in := RenderInput{
		RouterID: s.options.RouterID, Interface: s.options.Interface, LoopbackPort: s.options.LoopbackPort, Password: s.options.Password,
		TableID: s.options.TableID, ECMP: s.options.ECMP, ScanTime: s.options.KernelScanTime, Sessions: sessions, VIPs: w.vips,
	}
	if s.options.LogFileSize > 0 {
		in.LogFile, in.LogFileSize = filepath.Join(s.options.Dir, "bird.log"), s.options.LogFileSize
	}
	return in, problems
}

// Input returns what the configuration would be made of now, without secrets,
// and why gateways are missing in it.
func (s *Supervisor) Input() (RenderInput, map[string]string) {
	in, problems := s.inputNow(s.wanted.Load())
	return in.Masked(), problems
}
