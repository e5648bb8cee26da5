package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// lastResort is how long a process may take to end after SIGTERM when no stage of its stop bounds
// the call that hangs: the drain time and 30 s, after which cli.RunUntilStopped abandons the call,
// 5 s to print why, and 9 s for a busy machine. All other calls end within stopBound: the stages
// of the stop, and the 10 s after which task.Run abandons a task.
const lastResort = 45 * time.Second

// hungCall is a process with one blocking call that never returns.
type hungCall struct {
	name string
	// start starts the process and returns it once it works. DIR in arguments is replaced by a
	// separate directory.
	start func(f *hungFixture) *lab.Process
	// force makes the process make the call; nil if the process makes it periodically.
	force func(f *hungFixture)
	// peer reports whether a peer hangs; otherwise DIR hangs, before force.
	peer  bool
	early bool // DIR hangs before the start
	slow  bool // only the last resort ends the process
	// task is the task that Liveness of the frontend reports as hung; if empty, the test does not
	// wait for it.
	task string
}

// hungFixture is the fixture of one hungCall.
type hungFixture struct {
	*fixture
	dir     string
	stderr  *fifo
	process *lab.Process
}

// hang starts the process and makes its call hang.
func (f *hungFixture) hang(c hungCall) {
	f.t.Helper()
	f.dir = f.readinessDir()
	f.makeReadinessDir()
	if c.early {
		hangMount(f.t, f.dir)
	}
	f.process = c.start(f)
	if !c.early && !c.peer {
		hangMount(f.t, f.dir)
	}
	if c.force != nil {
		c.force(f)
	}
	if !c.peer {
		// Or it waits for the lock of a directory in which its BIRD is blocked: the kernel reports
		// the function of the lock, or of the open or unlink that waits for it.
		f.waitChannel("fuse_", "rwsem_down_", "d_alloc_parallel", "path_openat", "do_unlinkat")
	}
}

// wantHungTask waits until Liveness of the frontend names one hung task.
func (f *hungFixture) wantHungTask(task string) {
	f.t.Helper()
	client := healthv1.NewHealthClient(f.dial(lab.FrontendHealth))
	ctx := harness.Context(f.t, health.HungTask+waitTimeout)
	f.must(lab.Eventually(ctx, 100*time.Millisecond, func() error {
		r, err := client.Check(ctx, &healthv1.HealthCheckRequest{Service: "Liveness"})
		if err == nil && r.GetStatus() != healthv1.HealthCheckResponse_NOT_SERVING {
			err = fmt.Errorf("Liveness is %s", r.GetStatus())
		}
		return err
	}))
	if detail := f.waitFrontend("Liveness", false); !strings.HasPrefix(detail, "task "+task+" hangs for ") ||
		strings.Contains(detail, ";") {
		f.t.Errorf("Liveness: %s", detail)
	}
}

// args replaces DIR in arguments by the directory.
func (f *hungFixture) args(args []string) []string {
	args = slices.Clone(args)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "DIR", f.dir)
	}
	return args
}

func lbServes(args ...string) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		f.must(f.pod.StartLB(f.args(args)...))
		f.waitLog(f.pod.LB, "serving readiness")
		return f.pod.LB
	}
}

// lbStarts is lbServes for an lb that hangs before it serves.
func lbStarts(args ...string) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		f.must(f.pod.StartLB(f.args(args)...))
		return f.pod.LB
	}
}

func frontendStarts(args ...string) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		f.must(f.pod.StartFrontend(f.args(args)...))
		return f.pod.Frontend
	}
}

func frontendRuns(args ...string) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		p := frontendStarts(args...)(f)
		f.bird(p)
		return p
	}
}

// frontendReads starts a frontend that reads readiness files.
func frontendReads(f *hungFixture) *lab.Process {
	f.startDirectoryFrontend()
	f.bird(f.pod.Frontend)
	return f.pod.Frontend
}

// lbHasSVID starts an lb that reads its SVID from files.
func lbHasSVID(f *hungFixture) *lab.Process {
	a := f.authority()
	f.must(a.WriteFiles(f.dir, f.mint(a, lab.LBID)))
	return lbServes("--identity=files", "--svid-dir=DIR")(f)
}

// lbForwards starts an lb with a data plane.
func lbForwards(f *hungFixture) *lab.Process {
	for _, family := range []string{"ipv4", "ipv6"} {
		f.must(f.Pod.Sysctl("net."+family+".fib_multipath_hash_policy", "1"))
	}
	return lbServes("--state-dir=DIR", "--dataplane=nftables")(f)
}

var birdStarted = regexp.MustCompile(`msg="BIRD started" pid=([0-9]+)`)

// bird waits for BIRD and returns its process ID.
func (f *hungFixture) bird(p *lab.Process) (pid int) {
	f.t.Helper()
	f.waitLog(p, "BIRD started")
	pid, err := strconv.Atoi(birdStarted.FindStringSubmatch(p.Output())[1])
	f.must(err)
	return pid
}

// rewritten returns a start with a trench file in which old is replaced by text.
func rewritten(old, text string, start func(*hungFixture) *lab.Process) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), old, f.args([]string{text})[0])))
		return start(f)
	}
}

// runCommand starts a command of lb on the admin socket.
func runCommand(f *hungFixture, args ...string) *lab.Process {
	args = append([]string{filepath.Join(binaries, "lb")}, args...)
	p, err := f.Start(f.Pod, "command", append(args, "--admin-socket=unix://"+f.pod.LBAdmin())...)
	f.must(err)
	return p
}

// command makes lb run a command, without waiting for its end.
func command(args ...string) func(*hungFixture) {
	return func(f *hungFixture) {
		runCommand(f, args...)
	}
}

// killBIRD makes the frontend restart BIRD.
func killBIRD(f *hungFixture) { f.must(syscall.Kill(f.bird(f.process), syscall.SIGKILL)) }

// stopBIRD leaves BIRD's sockets open and silent.
func stopBIRD(f *hungFixture) { f.must(syscall.Kill(f.bird(f.process), syscall.SIGSTOP)) }

// addVIP changes the configuration of BIRD.
func addVIP(f *hungFixture) {
	f.must(f.pod.WriteTrench(strings.Replace(usualTrench(), "vips: [", "vips: [20.0.0.9/32, ", 1)))
}

// waitChannel waits until a thread of the process is blocked in one of the kernel functions
// (proc(5), wchan).
func (f *hungFixture) waitChannel(functions ...string) {
	f.t.Helper()
	f.waitFor(func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", f.process.PID()))
		if err != nil {
			return err
		}
		var channels []string
		for _, thread := range threads {
			channel, err := os.ReadFile(thread)
			if err != nil {
				continue // the thread ended
			}
			channels = append(channels, string(channel))
			blocked := func(function string) bool { return strings.Contains(string(channel), function) }
			if slices.ContainsFunc(functions, blocked) {
				return nil
			}
		}
		return fmt.Errorf("%s is not blocked in %s but in %v", f.process.Name, strings.Join(functions, " or "), channels)
	})
}

// silentPeer listens on a Unix socket, accepts every connection and sends nothing. waitAccepted
// waits for a connection.
func (f *hungFixture) silentPeer(path string) (waitAccepted func()) {
	f.t.Helper()
	l, err := net.Listen("unix", path)
	f.must(err)
	f.t.Cleanup(func() { _ = l.Close() })
	accepted := make(chan struct{}, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f.t.Cleanup(func() { _ = c.Close() })
			select {
			case accepted <- struct{}{}:
			default:
			}
		}
	}()
	return func() {
		f.t.Helper()
		await.Receive(f.t, "a connection to the silent listener", accepted)
	}
}

// spiffe starts lb or the frontend with a Workload API that accepts connections and sends nothing.
func spiffe(program string) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		agent := f.path("agent.sock")
		waitAccepted := f.silentPeer(agent)
		env := []string{"SPIFFE_ENDPOINT_SOCKET=unix://" + agent}
		if program == "lb" {
			f.startLBAs(env, as(f.pod.LBArgs(), "--identity=spiffe"))
			f.process = f.pod.LB
		} else {
			f.startFrontendAs(env, as(f.pod.FrontendArgs(), "--identity=spiffe"))
			f.process = f.pod.Frontend
		}
		waitAccepted()
		return f.process
	}
}

// silentLB starts the frontend with a load balancer that accepts connections and sends nothing.
func silentLB(f *hungFixture) *lab.Process {
	waitAccepted := f.silentPeer(f.pod.Socket())
	f.must(f.pod.StartFrontend())
	waitAccepted()
	return f.pod.Frontend
}

// silentRegistry starts `lb target add`, and silentAdmin `lb events --follow`, with an lb that
// sends nothing.
func silentRegistry(f *hungFixture) *lab.Process {
	waitAccepted := f.silentPeer(f.pod.Socket())
	f.authority()
	p := f.startRegistration("stream-a", "app-1", lab.AppID, lab.Target1v4)
	waitAccepted()
	return p
}

func silentAdmin(f *hungFixture) *lab.Process {
	waitAccepted := f.silentPeer(f.pod.LBAdmin())
	p := runCommand(f, "events", "--follow")
	waitAccepted()
	return p
}

// silentTarget starts an lb whose check timeout is an hour, with a target that accepts connections
// and sends nothing.
func silentTarget(f *hungFixture) *lab.Process {
	accepted := make(chan net.Conn)
	l := f.listen(lab.Target1v4, checkPort)
	go func() {
		if c, err := l.Accept(); err == nil {
			accepted <- c
		}
	}()
	p := rewritten("{tcp: {port: 5000}, interval: 500ms, timeout: 500ms,",
		"{http: {port: 5000}, interval: 1h, timeout: 1h,", lbServes())(f)
	c := await.Receive(f.t, "a check of the silent target", accepted)
	f.t.Cleanup(func() { _ = c.Close() })
	return p
}

// silentClients connects to every listener of the process, and sends nothing or half a request.
func silentClients(sockets func(*lab.Pod) []string, tcp ...string) func(*hungFixture) {
	return func(f *hungFixture) {
		for _, address := range append(sockets(f.pod), tcp...) {
			for _, text := range []string{"", "GET /metrics HTTP/1.1\r\nHost: ", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
				network := "tcp"
				if strings.HasPrefix(address, "/") {
					network = "unix"
				}
				c, err := f.dialPod(f.t.Context(), network, address)
				f.must(err)
				f.t.Cleanup(func() { _ = c.Close() })
				_, err = c.Write([]byte(text))
				f.must(err)
			}
		}
	}
}

// lbLogs starts an lb whose stderr is a FIFO that no process reads.
func lbLogs(f *hungFixture) *lab.Process {
	f.stderr = f.newFIFO("stderr")
	f.pod.LB = f.stderr.start(f.fixture, "lb", f.pod.LBArgs())
	f.wantHealth(lab.LBHealth, "Serving", healthServing)
	return f.pod.LB
}

func fillStderr(f *hungFixture) {
	f.stderr.fill()
	f.up(f.target1)
	f.waitChannel("pipe_write")
}

// birdSleeps starts the frontend with a BIRD whose configuration check never ends, and whose child
// keeps its stdout open when the check is killed.
func birdSleeps(f *hungFixture) *lab.Process {
	executable, called := f.path("sleeping-bird"), f.path("called")
	f.must(os.WriteFile(executable, []byte("#!/bin/sh\n>"+called+"\nsleep 1000\n"), 0o700))
	f.must(f.pod.StartFrontend("--gating=off", "--bird-executable="+executable))
	f.waitFor(func() error {
		_, err := os.Stat(called)
		return err
	})
	return f.pod.Frontend
}

// podRuns starts both programs and returns the frontend or lb.
func podRuns(frontend bool) func(*hungFixture) *lab.Process {
	return func(f *hungFixture) *lab.Process {
		f.up(f.target1)
		f.startPod()
		f.wantRoutes(vipA4, vipA6)
		if frontend {
			return f.pod.Frontend
		}
		return f.pod.LB
	}
}

// A process ends in bounded time after SIGTERM, whichever of its calls blocks forever.
func TestHungCallsStop(t *testing.T) {
	t.Parallel()
	lbSockets := func(p *lab.Pod) []string { return []string{p.Socket(), p.LBAdmin()} }
	frontendSockets := func(p *lab.Pod) []string { return []string{p.FrontendAdmin()} }
	const registryAddress = "127.0.0.1:7790"
	registry := append(registry, "--registry-address="+registryAddress)
	// t.Parallel would run too few calls concurrently: they mostly wait for the processes to end.
	var calls sync.WaitGroup
	setup := make(chan struct{}, 2)
	for _, c := range []hungCall{
		{name: "state at start of lb", start: lbStarts("--state-dir=DIR"), early: true, slow: true},
		{name: "socket of lb", start: lbServes("--socket=unix://DIR/lb.sock"), slow: true},
		{name: "unread stderr", start: lbLogs, force: fillStderr, peer: true},
		{
			name: "readiness files of lb", start: lbServes("--write-readiness-dir=DIR"),
			force: func(f *hungFixture) { f.up(f.target1) },
		},
		{name: "drains of lb", start: lbServes("--state-dir=DIR"), force: command("target", "drain", "target-1")},
		{name: "holds of lb", start: lbForwards, force: command("hold")},
		{name: "registrations of lb", start: lbServes(append(registry, "--state-dir=DIR")...)},
		{name: "admin socket of lb", start: lbServes("--admin-socket=unix://DIR/lb.sock")},
		{name: "SVID of lb", start: lbHasSVID},
		{name: "authority of lb", start: lbServes("--dev-authority-dir=DIR")},
		{name: "authority at start of lb", start: lbStarts("--dev-authority-dir=DIR"), early: true},
		{
			name:  "authorities of checks",
			start: rewritten("tcp: {port: 5000}", "http: {port: 5000, tls: {caFile: DIR/ca.pem}}", lbServes()),
		},
		{name: "readiness directory of frontend", start: frontendReads},
		{name: "socket of the load balancer", start: frontendRuns("--lb-socket=unix://DIR/lb.sock")},
		{name: "admin socket of frontend", start: frontendRuns("--gating=off", "--admin-socket=unix://DIR/fe.sock")},
		{
			// With --import-routes=all the configuration contains the VIPs.
			name:  "configuration of BIRD",
			start: frontendRuns("--gating=off", "--bird-dir=DIR", "--import-routes=all"), force: addVIP,
		},
		{
			name: "configuration at restart of BIRD", start: frontendRuns("--gating=off", "--bird-dir=DIR"),
			force: killBIRD,
		},
		{
			name: "process ID of BIRD", start: frontendRuns("--gating=off", "--bird-socket=DIR/bird.ctl"),
			force: killBIRD,
		},
		{
			name: "state at start of frontend", start: frontendStarts("--gating=off", "--bird-dir=DIR"), early: true,
			slow: true,
		},
		{
			name: "configuration of BIRD", start: frontendRuns("--gating=off", "--bird-dir=DIR"),
			force: func(f *hungFixture) { f.must(syscall.Kill(f.bird(f.pod.Frontend), syscall.SIGKILL)) },
			task:  "BIRD",
		},
		{
			name: "password of a gateway",
			start: rewritten("name: gateway-a4,", "name: gateway-a4, passwordFile: DIR/key,",
				frontendRuns("--gating=off")),
		},
		{name: "stopped BIRD", start: frontendRuns("--gating=off"), force: stopBIRD, peer: true},
		{name: "Workload API of lb", start: spiffe("lb"), peer: true},
		{name: "Workload API of frontend", start: spiffe("frontend"), peer: true},
		{name: "silent load balancer", start: silentLB, peer: true},
		{name: "silent registry", start: silentRegistry, peer: true},
		{name: "silent admin socket", start: silentAdmin, peer: true},
		{name: "silent target", start: silentTarget, peer: true},
		{
			name: "silent clients of lb", start: lbServes(registry...), peer: true,
			force: silentClients(lbSockets, lab.LBHealth, lab.LBMetrics, registryAddress),
		},
		{
			name: "silent clients of frontend", start: frontendRuns("--gating=off"), peer: true,
			force: silentClients(frontendSockets, lab.FrontendHealth, lab.FrontendMetrics),
		},
		{name: "check of BIRD's configuration", start: birdSleeps, peer: true},
		{
			name: "stopped load balancer", start: podRuns(true), peer: true,
			force: func(f *hungFixture) { f.must(f.pod.LB.Signal(syscall.SIGSTOP)) },
		},
		{
			name: "stopped frontend", start: podRuns(false), peer: true,
			force: func(f *hungFixture) { f.must(f.pod.Frontend.Signal(syscall.SIGSTOP)) },
		},
	} {
		calls.Go(func() {
			t.Run(c.name, func(t *testing.T) {
				setup <- struct{}{}
				complete := sync.OnceFunc(func() { <-setup })
				defer complete()
				f := &hungFixture{fixture: newFixture(t)}
				f.hang(c)
				complete()
				if c.task != "" {
					f.wantHungTask(c.task)
				}
				f.must(f.process.Signal(syscall.SIGTERM))
				bound := stopBound
				if c.slow {
					bound = lastResort
				}
				ctx := harness.Context(t, bound)
				_, err := f.process.Wait(ctx)
				f.must(err)
				t.Logf("last line: %s", f.process.Tail(1))
			})
		})
	}
	calls.Wait()
}
