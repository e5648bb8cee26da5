package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// greeting returns one whole ClientHello.
func greeting(t *testing.T) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		// The handshake ends with the pipe: no server answers.
		_ = tls.Client(theirs, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(t.Context())
		theirs.Close()
	}()
	record := make([]byte, 5)
	if _, err := io.ReadFull(ours, record); err != nil {
		t.Fatal(err)
	}
	record = append(record, make([]byte, int(record[3])<<8|int(record[4]))...)
	if _, err := io.ReadFull(ours, record[5:]); err != nil {
		t.Fatal(err)
	}
	return record
}

// garbage returns input that is invalid for both servers.
func garbage(t *testing.T) [][]byte {
	t.Helper()
	noise := make([]byte, 4<<10)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(noise) // never fails
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	broken := slices.Clone(greeting(t))
	for i := 40; i < len(broken); i += 7 {
		broken[i] ^= 0xff
	}
	return [][]byte{
		noise,
		make([]byte, 64<<10),
		[]byte("\r\n\r\n\r\n"),
		[]byte("GET / HTTP/1.1\r\nHost: " + strings.Repeat("x", 8<<10) + "\r\n\r\n"),
		[]byte(preface + "\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
		append([]byte(preface), noise...),
		append([]byte("\x16\x03\x01\x40\x00"), noise...), // a truncated record of 16 KiB
		broken,
		greeting(t)[:20],
	}
}

// halfWriter is a connection that supports closing its write side.
type halfWriter interface{ CloseWrite() error }

// ended waits until the peer has closed a connection, with or without sending data before, or
// until a deadline.
func ended(conn net.Conn, deadline time.Time) error {
	if err := conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, syscall.ECONNRESET) &&
		!errors.Is(err, syscall.EPIPE) {
		return err
	}
	return nil
}

// crowd holds connections to the pod until the test ends.
type crowd struct {
	*fixture
	connections []net.Conn
}

func (c *crowd) connect(network, addr string) net.Conn {
	c.t.Helper()
	conn, err := c.dialPod(c.t.Context(), network, addr)
	c.must(err)
	c.t.Cleanup(func() { conn.Close() })
	c.connections = append(c.connections, conn)
	return conn
}

// Garbage on the readiness, admin and control sockets ends no process and changes nothing at the
// gateway.
func TestGarbageAndHalfOpenConnections(t *testing.T) {
	t.Parallel()
	const silent = 50 // on each socket
	f := newServing(t, 1)
	mark, bird, from := f.mark(), f.birdPID(), length(f.pod.LB)
	operator := f.operator()
	c := &crowd{fixture: f}
	hello := greeting(t)

	unix := []string{f.pod.Socket(), f.pod.LBAdmin(), f.pod.FrontendAdmin()}
	tcp := []string{lab.LBHealth, lab.FrontendHealth, lab.LBMetrics, lab.FrontendMetrics}
	var wg sync.WaitGroup
	errs := make(chan error, 1000)
	each := func(open func(network, addr string)) {
		for _, addr := range unix {
			open("unix", addr)
		}
		for _, addr := range tcp {
			open("tcp", addr)
		}
	}
	// Silent connections, and connections with a partial handshake, stay open during the test.
	each(func(network, addr string) {
		for n := range silent {
			conn := c.connect(network, addr)
			if n%2 == 1 {
				_, err := conn.Write(hello[:len(hello)/2])
				f.must(err)
			}
		}
	})
	// Every server closes the connection of a client that sends garbage.
	deadline := time.Now().Add(waitTimeout)
	each(func(network, addr string) {
		for n, nonsense := range garbage(t) {
			conn := c.connect(network, addr)
			wg.Go(func() {
				_, _ = conn.Write(nonsense) // the server may close it during the write
				_ = conn.(halfWriter).CloseWrite()
				if err := ended(conn, deadline); err != nil {
					errs <- fmt.Errorf("garbage %d on %s: %w", n, addr, err)
				}
			})
		}
	})
	// A handshake of one byte at a time ends at a deadline that the client cannot extend.
	slow := c.connect("unix", f.pod.Socket())
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		// All but the last byte: the handshake never completes.
		for n := range len(hello) - 1 {
			if _, err := slow.Write(hello[n : n+1]); err != nil {
				return
			}
			if time.Now().After(deadline) {
				break
			}
			select {
			case <-tick.C:
			case <-t.Context().Done():
				return
			}
		}
		errs <- errors.New("the slow handshake was never ended")
	})
	// A second client of BIRD's control socket, in addition to the frontend.
	for _, junk := range [][]byte{
		append(bytes.Repeat([]byte{0, 0xff, 0x7f, 1}, 200), '\n'),
		bytes.Repeat([]byte("x"), 5<<10), // too long for a command, and unterminated
		[]byte(strings.Repeat("y", 900) + "\n"),
		[]byte("show protocols all \"\n\n\n;;}{\nnonsense\nconfigure nonsense\n"),
		[]byte("show prot"), // a truncated command
		[]byte(strings.Repeat("show protocols all\n", 500)),
	} {
		// The client never reads the answers.
		_, err := c.connect("unix", f.pod.BirdSocket()).Write(junk)
		f.must(err)
	}

	// All other clients are served during the flood.
	if _, err := f.ask(operator); err != nil {
		t.Errorf("the operator, amid garbage: %v", err)
	}
	if _, err := f.ask(f.operator()); err != nil {
		t.Errorf("a new connection of the operator, amid garbage: %v", err)
	}
	f.up(f.target2)
	f.wantRoutes(every()...)
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	f.waitLine(f.pod.LB, from, "client refused", "reason=timeout")
	f.waitLine(f.pod.LB, from, "client refused", "reason=not_tls")
	// Silent connections to the readiness and admin sockets are closed eventually.
	deadline = time.Now().Add(waitTimeout)
	for _, conn := range c.connections[:silent*len(unix)] {
		if err := ended(conn, deadline); err != nil {
			t.Errorf("a silent connection on %s: %v", conn.RemoteAddr(), err)
		}
	}
	f.wantRunning(f.pod.LB, f.pod.Frontend)
	if now := f.birdPID(); now != bird || !f.runs(bird) {
		t.Errorf("BIRD is %d now, it was %d, which runs: %t", now, bird, f.runs(bird))
	}
	if b := f.frontendStatus().GetBird(); b.GetRestarts() != 0 || b.GetError() != "" {
		t.Errorf("BIRD: %v", b)
	}
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.wantUpdates(mark, vipB4, announced, withdrawn)
}

// A SPIFFE ID has 8 streams (docs/architecture.md#wire-contract).
func TestStreamLimitOfPeer(t *testing.T) {
	t.Parallel()
	const limit = readiness.DefaultMaxStreamsPerPeer
	f := newServing(t, 1)
	mark, from := f.mark(), length(f.pod.LB)
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	// The limit applies to the ID, not to the connection.
	conns := []*grpc.ClientConn{f.operator(), f.operator()}
	open := func(n int) (func(), error) {
		ctx, cancel := context.WithCancel(ctx)
		stream, err := readinessv1.NewReadinessServiceClient(conns[n%len(conns)]).WatchReadiness(
			ctx, &readinessv1.WatchReadinessRequest{},
		)
		if err == nil {
			_, err = stream.Recv()
		}
		return cancel, err
	}
	var closeOne func()
	for n := range limit {
		end, err := open(n)
		if err != nil {
			t.Fatalf("stream %d: %v", n, err)
		}
		defer end()
		closeOne = end
	}
	for n := range 2 {
		end, err := open(n)
		defer end()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), lab.OperatorID) {
			t.Errorf("stream %d ended with %v, want ResourceExhausted with the ID", limit+n, err)
		}
	}
	f.waitLine(f.pod.LB, from, "too many open streams", "peer="+lab.OperatorID, fmt.Sprintf("limit=%d", limit))
	// Each peer has a separate limit.
	f.stop(f.pod.Frontend)
	f.wantNoUpdates(mark, vipB4)
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	closeOne()
	f.waitFor(func() error {
		end, err := open(0)
		defer end()
		return err
	})
}

// unprivilegedUID is a user, and a group, without privileges.
const unprivilegedUID = 65534

// dialAs connects to a unix socket as another user.
func dialAs(uid, gid int, path string) (conn net.Conn, err error) {
	err = asUser(uid, gid, func() (err error) {
		conn, err = net.Dial("unix", path)
		return err
	})
	return conn, err
}

// The admin sockets admit the same user and root only (docs/architecture.md#security).
func TestAdminSocketPeerUser(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.startPod()
	f.waitLB("Liveness", true)
	f.waitFrontend("Liveness", true)
	// Other users need access to the sockets.
	f.must(os.Chmod(f.Dir, 0o711))
	for _, c := range []struct {
		process *lab.Process
		program string
		socket  string
	}{{f.pod.LB, "lb", f.pod.LBAdmin()}, {f.pod.Frontend, "frontend", f.pod.FrontendAdmin()}} {
		t.Run(c.program, func(t *testing.T) {
			f := f.in(t)
			if mode := modeOf(t, c.socket); mode != 0o600 {
				t.Errorf("the admin socket has mode %#o, want 0600", mode)
			}
			if conn, err := dialAs(unprivilegedUID, unprivilegedUID, c.socket); !errors.Is(err, fs.ErrPermission) {
				t.Errorf("another user's connect gave %v, error %v; want no permission", conn, err)
			}
			out, code := f.runAs(unprivilegedUID, c.program, "status", "--admin-socket=unix://"+c.socket)
			if code != 1 || !strings.Contains(out, "permission denied") || !strings.Contains(out, "another user") {
				t.Errorf("%s status as another user: exit status %d: %s", c.program, code, out)
			}

			// An operator makes it accessible to all users: the kernel's peer credentials still
			// decide.
			f.must(os.Chmod(c.socket, 0o666))
			from := length(c.process)
			conn, err := grpc.NewClient("unix:"+c.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
					return dialAs(unprivilegedUID, unprivilegedUID, c.socket)
				}))
			f.must(err)
			defer conn.Close()
			ctx := harness.Context(t, waitTimeout)
			if names, err := services(ctx, conn); status.Code(err) != codes.Unavailable {
				t.Errorf("another user got %v, error %v", names, err)
			}
			f.waitLine(c.process, from, "admin connection refused",
				fmt.Sprintf("user %d may not use this socket", unprivilegedUID), fmt.Sprintf("peer_uid=%d",
					unprivilegedUID))
			http, err := dialAs(unprivilegedUID, unprivilegedUID, c.socket)
			f.must(err)
			defer http.Close()
			_, _ = io.WriteString(http, "GET /debug/pprof/ HTTP/1.0\r\n\r\n") // it may be closed already
			if answer, _ := io.ReadAll(http); len(answer) > 0 {
				t.Errorf("another user got pprof: %s", answer)
			}
			if names, err := services(ctx, f.dial(c.socket)); err != nil || len(names) == 0 {
				t.Errorf("root got %v, error %v", names, err)
			}
		})
	}
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Stat(path)
	harness.Must(t, err)
	return info.Mode().Perm()
}

// runAs runs lb or frontend as another user and returns its output and exit status.
func (f *fixture) runAs(uid uint32, program string, args ...string) (string, int) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	// Only root may read the folder of the binaries.
	path := f.path("open-" + program)
	if _, err := os.Stat(path); err != nil {
		// A separate process copies the file: a child that this process forks concurrently
		// inherits the descriptor open for writing until its exec, and exec of the copy would fail
		// with ETXTBSY.
		f.must(exec.CommandContext(ctx, "install", "-m", "755", filepath.Join(binaries, program), path).Run())
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		f.t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// The readiness socket has mode 0600, or 0660 by --socket-mode, and its directory is created if it
// is missing (docs/architecture.md#security).
func TestReadinessSocketMode(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(os.Chmod(f.Dir, 0o711))
	for _, c := range []struct {
		name              string
		args              []string
		socket, directory fs.FileMode
		group             bool // may connect
	}{
		{"by default", nil, 0o600, 0o700, false},
		{"for a group", []string{"--socket-mode=0660"}, 0o660, 0o750, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := f.in(t)
			// A umask that removes all permissions except the owner's.
			dir := f.path(fmt.Sprintf("socket-%o", c.socket))
			socket := filepath.Join(dir, "lb.sock")
			args := slices.Concat(f.pod.LBArgs(c.args...), []string{"--socket=unix://" + socket})
			p, err := f.Start(f.Pod, "lb", append([]string{"/bin/sh", "-c", `umask 077; exec "$@"`, "lb"}, args...)...)
			f.must(err)
			f.pod.LB = p
			f.waitLB("Readiness", true)
			if got := modeOf(t, socket); got != c.socket {
				t.Errorf("the socket has mode %#o, want %#o", got, c.socket)
			}
			if got := modeOf(t, dir); got != c.directory {
				t.Errorf("its folder has mode %#o, want %#o", got, c.directory)
			}
			for _, gid := range []int{0, unprivilegedUID} { // 0 is the group of the socket
				want := c.group && gid == 0
				conn, err := dialAs(unprivilegedUID, gid, socket)
				if (err == nil) != want {
					t.Errorf("connect of group %d: %v, want leave: %t", gid, err, want)
				}
				if err == nil {
					conn.Close()
				}
			}
			f.stop(p)
			if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
				t.Errorf("the end of lb left %v, error %v", left, err)
			}
		})
	}
}

// A lock and a connection attempt precede the removal of a leftover socket; other files are never
// removed (docs/architecture.md#security).
func TestReadinessSocketOwnership(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	if _, err := net.Dial("unix", f.pod.Socket()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("kill -9 left no socket that refuses, so that nothing is shown: %v", err)
	}
	f.must(f.pod.StartLB())
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()

	// In another network namespace, where no lb is the owner.
	beside := []string{
		"--health-address=127.0.0.1:7791", "--metrics-address=", "--admin-socket=unix://" + f.path("other-admin.sock"),
	}
	out, code := f.runIn(f.Backend, "lb", slices.Concat(f.pod.LBArgs()[1:], beside)...)
	if want := "socket " + f.pod.Socket() + " is in use by another process"; code != 1 || !strings.Contains(out, want) {
		t.Errorf("a second lb on the socket: exit status %d, want 1 for %q: %s", code, want, out)
	}
	if _, err := f.ask(f.operator()); err != nil {
		t.Errorf("the first lb, after a second one tried: %v", err)
	}

	precious := f.path("precious")
	f.must(os.WriteFile(precious, []byte("do not remove"), 0o600))
	out, code = f.runIn(
		f.Backend, "lb", slices.Concat(f.pod.LBArgs()[1:], beside, []string{"--socket=unix://" + precious})...,
	)
	if want := precious + " is not a socket but a file"; code != 1 || !strings.Contains(out, want) {
		t.Errorf("lb on a file: exit status %d, want 1 for %q: %s", code, want, out)
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "do not remove" {
		t.Errorf("the file holds %q now, error %v", b, err)
	}
	f.wantSilence(mark)
}
