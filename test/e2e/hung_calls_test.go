package e2e

import (
	"context"
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

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/lab"
)

// lastResort is how long a process may take to end after SIGTERM when no stage of its stop bounds the call that hangs:
// the drain time and 30 s, after which cli.RunUntilStopped leaves the call behind, 5 s to print
// why, and 9 s for a busy machine. The others end within stopBound: the stages of the stop, and the
// 10 s after which task.Run leaves a task.
const lastResort = 45 * time.Second

// hungCall is a process with one blocking call that never returns.
type hungCall struct {
	name string
	// start starts the process and returns it once it works. DIR in arguments is a directory of its
	// own.
	start func(w *hungWorld) *lab.Process
	// force has the process make the call; nil: the process makes it periodically.
	force func(w *hungWorld)
	// peer reports whether it is a peer that hangs; otherwise DIR hangs, before force.
	peer  bool
	early bool // DIR hangs before the start
	slow  bool // nothing but the last resort ends the process
}

// hungWorld is the world of one hungCall.
type hungWorld struct {
	*world
	dir     string
	process *lab.Process
}

// hang starts the process and has its call hang.
func (w *hungWorld) hang(c hungCall) {
	w.t.Helper()
	w.dir = w.readinessDir()
	w.makeReadinessDir()
	if c.early {
		hangMount(w.t, w.dir)
	}
	w.process = c.start(w)
	if !c.early && !c.peer {
		hangMount(w.t, w.dir)
	}
	if c.force != nil {
		c.force(w)
	}
	if !c.peer {
		w.waitChannel("fuse_")
	}
}

// args are arguments with the directory in place of DIR.
func (w *hungWorld) args(args []string) []string {
	args = slices.Clone(args)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "DIR", w.dir)
	}
	return args
}

func lbServes(args ...string) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		w.must(w.pod.StartLB(w.args(args)...))
		w.waitLog(w.pod.LB, "serving readiness")
		return w.pod.LB
	}
}

// lbStarts is lbServes for an lb that does not come that far.
func lbStarts(args ...string) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		w.must(w.pod.StartLB(w.args(args)...))
		return w.pod.LB
	}
}

func frontendStarts(args ...string) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		w.must(w.pod.StartFrontend(w.args(args)...))
		return w.pod.Frontend
	}
}

func frontendRuns(args ...string) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		p := frontendStarts(args...)(w)
		w.bird(p)
		return p
	}
}

// frontendReads starts a frontend that reads readiness files.
func frontendReads(w *hungWorld) *lab.Process {
	w.startDirectoryFrontend()
	w.bird(w.pod.Frontend)
	return w.pod.Frontend
}

// lbHasSVID starts an lb whose SVID is in files.
func lbHasSVID(w *hungWorld) *lab.Process {
	a := w.authority()
	w.must(a.WriteFiles(w.dir, w.mint(a, lab.LBID)))
	return lbServes("--identity=files", "--svid-dir=DIR")(w)
}

// lbForwards starts an lb with a data plane.
func lbForwards(w *hungWorld) *lab.Process {
	for _, family := range []string{"ipv4", "ipv6"} {
		w.must(w.Pod.Sysctl("net."+family+".fib_multipath_hash_policy", "1"))
	}
	return lbServes("--state-dir=DIR", "--dataplane=nftables")(w)
}

var birdStarted = regexp.MustCompile(`msg="BIRD started" pid=([0-9]+)`)

// bird is the process id of BIRD, which is waited for.
func (w *hungWorld) bird(p *lab.Process) (pid int) {
	w.t.Helper()
	w.waitLog(p, "BIRD started")
	pid, err := strconv.Atoi(birdStarted.FindStringSubmatch(p.Output())[1])
	w.must(err)
	return pid
}

// rewritten has start run with a trench file in which old is replaced by text.
func rewritten(old, text string, start func(*hungWorld) *lab.Process) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), old, w.args([]string{text})[0])))
		return start(w)
	}
}

// runCommand starts a command of lb on the admin socket.
func runCommand(w *hungWorld, args ...string) *lab.Process {
	args = append([]string{filepath.Join(binaries, "lb")}, args...)
	p, err := w.Start(w.Pod, "command", append(args, "--admin-socket=unix://"+w.pod.LBAdmin())...)
	w.must(err)
	return p
}

// command has lb serve a command, which is not waited for.
func command(args ...string) func(*hungWorld) {
	return func(w *hungWorld) {
		runCommand(w, args...)
	}
}

// killBIRD has the frontend start BIRD again.
func killBIRD(w *hungWorld) { w.must(syscall.Kill(w.bird(w.process), syscall.SIGKILL)) }

// stopBIRD leaves BIRD's sockets open and silent.
func stopBIRD(w *hungWorld) { w.must(syscall.Kill(w.bird(w.process), syscall.SIGSTOP)) }

// addVIP changes the configuration of BIRD.
func addVIP(w *hungWorld) {
	w.must(w.pod.WriteTrench(strings.Replace(usualTrench(), "vips: [", "vips: [20.0.0.9/32, ", 1)))
}

// waitChannel waits until a thread of the process is blocked in such a function of the kernel
// (proc(5), wchan).
func (w *hungWorld) waitChannel(function string) {
	w.t.Helper()
	w.waitFor(func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", w.process.PID()))
		if err != nil {
			return err
		}
		for _, thread := range threads {
			if channel, err := os.ReadFile(thread); err == nil && strings.Contains(string(channel), function) {
				return nil
			}
		}
		return fmt.Errorf("%s is not blocked in %s", w.process.Name, function)
	})
}

// silent listens on a Unix socket, accepts every connection and answers nothing. waitAccepted waits
// for a connection.
func (w *hungWorld) silent(path string) (waitAccepted func()) {
	w.t.Helper()
	l, err := net.Listen("unix", path)
	w.must(err)
	w.t.Cleanup(func() { _ = l.Close() })
	accepted := make(chan struct{}, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.t.Cleanup(func() { _ = c.Close() })
			select {
			case accepted <- struct{}{}:
			default:
			}
		}
	}()
	return func() {
		w.t.Helper()
		select {
		case <-accepted:
		case <-time.After(patience):
			w.t.Fatal("no connection to the silent listener")
		}
	}
}

// spiffe starts lb or the frontend with a Workload API that accepts connections and answers
// nothing.
func spiffe(program string) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		agent := w.path("agent.sock")
		waitAccepted := w.silent(agent)
		env := []string{"SPIFFE_ENDPOINT_SOCKET=unix://" + agent}
		if program == "lb" {
			w.startLBAs(env, as(w.pod.LBArgs(), "--identity=spiffe"))
			w.process = w.pod.LB
		} else {
			w.startFrontendAs(env, as(w.pod.FrontendArgs(), "--identity=spiffe"))
			w.process = w.pod.Frontend
		}
		waitAccepted()
		return w.process
	}
}

// silentLB starts the frontend with a load balancer that accepts connections and answers nothing.
func silentLB(w *hungWorld) *lab.Process {
	waitAccepted := w.silent(w.pod.Socket())
	w.must(w.pod.StartFrontend())
	waitAccepted()
	return w.pod.Frontend
}

// silentRegistry starts `lb target add`, and silentAdmin `lb events --follow`, with an lb that
// answers nothing.
func silentRegistry(w *hungWorld) *lab.Process {
	waitAccepted := w.silent(w.pod.Socket())
	w.authority()
	p := w.startRegistration("stream-a", "app-1", lab.AppID, lab.Target1v4)
	waitAccepted()
	return p
}

func silentAdmin(w *hungWorld) *lab.Process {
	waitAccepted := w.silent(w.pod.LBAdmin())
	p := runCommand(w, "events", "--follow")
	waitAccepted()
	return p
}

// silentTarget starts an lb whose check of a target, which accepts connections and answers nothing,
// takes an hour.
func silentTarget(w *hungWorld) *lab.Process {
	accepted := make(chan net.Conn)
	l := w.listen(lab.Target1v4, checkPort)
	go func() {
		if c, err := l.Accept(); err == nil {
			accepted <- c
		}
	}()
	p := rewritten("{tcp: {port: 5000}, interval: 100ms, timeout: 100ms,",
		"{http: {port: 5000}, interval: 1h, timeout: 1h,", lbServes())(w)
	select {
	case c := <-accepted:
		w.t.Cleanup(func() { _ = c.Close() })
	case <-time.After(patience):
		w.t.Fatal("no check of the silent target")
	}
	return p
}

// silentClients connects to every listener of the process, and sends nothing, or half a request.
func silentClients(sockets func(*lab.Pod) []string, tcp ...string) func(*hungWorld) {
	return func(w *hungWorld) {
		for _, address := range append(sockets(w.pod), tcp...) {
			for _, text := range []string{"", "GET /metrics HTTP/1.1\r\nHost: ", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
				network := "tcp"
				if strings.HasPrefix(address, "/") {
					network = "unix"
				}
				c, err := w.dialPod(w.t.Context(), network, address)
				w.must(err)
				w.t.Cleanup(func() { _ = c.Close() })
				_, err = c.Write([]byte(text))
				w.must(err)
			}
		}
	}
}

// stderr is a FIFO that nothing reads, which lb fills up.
func (w *hungWorld) stderr() string { return w.path("stderr") }

func lbLogs(w *hungWorld) *lab.Process {
	w.must(unix.Mkfifo(w.stderr(), 0o600))
	reader, err := os.OpenFile(w.stderr(), os.O_RDWR, 0) // a FIFO without a reader does not open
	w.must(err)
	w.t.Cleanup(func() { _ = reader.Close() })
	shell := []string{"/bin/sh", "-c", `exec "$@" 2>` + w.stderr(), "sh"}
	w.pod.LB, err = w.Start(w.Pod, "lb", append(shell, w.pod.LBArgs()...)...)
	w.must(err)
	w.wantHealth(lab.LBHealth, "Serving", healthServing)
	return w.pod.LB
}

func fillStderr(w *hungWorld) {
	fd, err := unix.Open(w.stderr(), unix.O_WRONLY|unix.O_NONBLOCK, 0)
	w.must(err)
	for err == nil {
		_, err = unix.Write(fd, make([]byte, 1))
	}
	w.must(unix.Close(fd))
	w.up(w.target1)
	w.waitChannel("pipe_write")
}

// birdSleeps starts the frontend with a BIRD whose check of the configuration never
// ends, and whose child keeps its stdout open when it is killed.
func birdSleeps(w *hungWorld) *lab.Process {
	executable, called := w.path("sleeping-bird"), w.path("called")
	w.must(os.WriteFile(executable, []byte("#!/bin/sh\n>"+called+"\nsleep 1000\n"), 0o700))
	w.must(w.pod.StartFrontend("--gating=off", "--bird-executable="+executable))
	w.waitFor(func() error {
		_, err := os.Stat(called)
		return err
	})
	return w.pod.Frontend
}

// podRuns starts both programs; the process is the frontend, or else lb.
func podRuns(frontend bool) func(*hungWorld) *lab.Process {
	return func(w *hungWorld) *lab.Process {
		w.up(w.target1)
		w.startPod()
		w.wantRoutes(vipA4, vipA6)
		if frontend {
			return w.pod.Frontend
		}
		return w.pod.LB
	}
}

// A process ends in bounded time after SIGTERM, whichever of its calls blocks for ever.
func TestHungCallsStop(t *testing.T) {
	t.Parallel()
	lbSockets := func(p *lab.Pod) []string { return []string{p.Socket(), p.LBAdmin()} }
	frontendSockets := func(p *lab.Pod) []string { return []string{p.FrontendAdmin()} }
	const registryAddress = "127.0.0.1:7790"
	registry := append(registry, "--registry-address="+registryAddress)
	// Not by t.Parallel: most of the time passes while the processes end, all of them at once.
	var calls sync.WaitGroup
	setup := make(chan struct{}, 2)
	for _, c := range []hungCall{
		{name: "state at start of lb", start: lbStarts("--state-dir=DIR"), early: true, slow: true},
		{name: "socket of lb", start: lbServes("--socket=unix://DIR/lb.sock"), slow: true},
		{name: "unread stderr", start: lbLogs, force: fillStderr, peer: true, slow: true},
		{
			name: "readiness files of lb", start: lbServes("--write-readiness-dir=DIR"),
			force: func(w *hungWorld) { w.up(w.target1) },
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
		{name: "configuration of BIRD", start: frontendRuns("--gating=off", "--bird-dir=DIR"), force: addVIP},
		{name: "configuration at restart of BIRD", start: frontendRuns("--gating=off", "--bird-dir=DIR"), force: killBIRD},
		{name: "process ID of BIRD", start: frontendRuns("--gating=off", "--bird-socket=DIR/bird.ctl"), force: killBIRD},
		{name: "configuration at start of BIRD", start: frontendStarts("--gating=off", "--bird-dir=DIR"), early: true},
		{
			name:  "password of a gateway",
			start: rewritten("name: gateway-a4,", "name: gateway-a4, passwordFile: DIR/key,", frontendRuns("--gating=off")),
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
			force: func(w *hungWorld) { w.must(w.pod.LB.Signal(syscall.SIGSTOP)) },
		},
		{
			name: "stopped frontend", start: podRuns(false), peer: true,
			force: func(w *hungWorld) { w.must(w.pod.Frontend.Signal(syscall.SIGSTOP)) },
		},
	} {
		calls.Go(func() {
			t.Run(c.name, func(t *testing.T) {
				setup <- struct{}{}
				complete := sync.OnceFunc(func() { <-setup })
				defer complete()
				w := &hungWorld{world: newWorld(t)}
				w.hang(c)
				complete()
				w.must(w.process.Signal(syscall.SIGTERM))
				bound := stopBound
				if c.slow {
					bound = lastResort
				}
				ctx, cancel := context.WithTimeout(t.Context(), bound)
				defer cancel()
				_, err := w.process.Wait(ctx)
				w.must(err)
				t.Logf("last line: %s", w.process.Tail(1))
			})
		})
	}
	calls.Wait()
}
