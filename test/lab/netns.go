package lab

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// netnsDir is where iproute2 keeps named namespaces.
const netnsDir = "/run/netns"

// namePattern matches the names this package gives: the owner's process ID and a random number.
var namePattern = regexp.MustCompile(`^vg-([0-9]+)-[0-9a-f]{6}$`)

// commandTimeout bounds every call of iproute2.
const commandTimeout = 30 * time.Second

// TB is the part of testing.TB that the lab uses, so that programs other than tests do not link
// package testing.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// NetNS is a network namespace of a lab, with loopback up.
type NetNS struct {
	name     string
	quickDAD bool
}

// removeOnce limits the search for leftovers to one per process.
var removeOnce = sync.OnceValue(RemoveLeftovers)

// NewNetNS creates a namespace that is removed with the test, after it has removed the remains
// of killed runs.
func NewNetNS(t TB, options ...Option) *NetNS {
	t.Helper()
	if err := removeOnce(); err != nil {
		t.Fatalf("leftovers of an earlier run: %v", err)
	}
	n, err := Create(options...)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Errorf("%v", err)
		}
	})
	return n
}

// Create creates a namespace with a random name. The caller closes it.
func Create(options ...Option) (*NetNS, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces need root: run as root")
	}
	random := make([]byte, 3)
	if _, err := rand.Read(random); err != nil {
		return nil, fmt.Errorf("name of a namespace: %w", err)
	}
	n := &NetNS{
		name:     fmt.Sprintf("vg-%d-%s", os.Getpid(), hex.EncodeToString(random)),
		quickDAD: slices.Contains(options, QuickDAD),
	}
	if err := ip("netns", "add", n.name); err != nil {
		return nil, err
	}
	err := errors.Join(n.Do(loopbackUp), n.doubleTimeouts())
	if slices.Contains(options, WithoutDAD) {
		err = errors.Join(err, n.Sysctl("net.ipv6.conf.default.accept_dad", "0"))
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// doubleTimeouts lets the kernel send a SYN again after 1, 3 and 7 s (RFC 6298), as before Linux
// 6.5, and not each second at first: a request then shows that a VIP was dark for 1 s.
func (n *NetNS) doubleTimeouts() error {
	err := n.Sysctl("net.ipv4.tcp_syn_linear_timeouts", "0")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// loopbackUp sets the loopback interface of the calling thread's namespace up.
func loopbackUp() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket to set lo up: %w", err)
	}
	request, err := unix.NewIfreq("lo")
	if err == nil {
		request.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request)
	}
	if err = errors.Join(err, unix.Close(socket)); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// Close removes the namespace's name. Processes that still run in the namespace keep it alive.
func (n *NetNS) Close() error {
	// A killed run can leave a name without a namespace.
	_ = unix.Unmount(n.Path(), unix.MNT_DETACH)
	return os.Remove(n.Path())
}

// Name returns the name for `ip -n` and `ip netns exec`.
func (n *NetNS) Name() string { return n.name }

// Path returns the file of the namespace.
func (n *NetNS) Path() string { return filepath.Join(netnsDir, n.name) }

// Do runs fn on a thread in the namespace. This applies to fn itself, to sockets that it opens
// and to processes that it starts, but not to goroutines that it starts.
func (n *NetNS) Do(fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- n.do(fn) }()
	return <-done
}

func (n *NetNS) do(fn func() error) error {
	runtime.LockOSThread()
	// A thread that could not return to its namespace stays locked, so that the
	// runtime ends it together with this goroutine.
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("own network namespace: %w", err)
	}
	defer unix.Close(home)
	target, err := unix.Open(n.Path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("network namespace %s: %w", n.name, err)
	}
	defer unix.Close(target)
	if err := unix.Setns(target, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", n.name, err)
	}
	defer func() {
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return fn()
}

// Start starts a command in the namespace. The process belongs to the caller.
func (n *NetNS) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs a command in the namespace and returns its output.
func (n *NetNS) Run(ctx context.Context, name string, args ...string) (string, error) {
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.CommandContext(ctx, name, args...).CombinedOutput()
		return err
	})
	if err != nil {
		return string(out), fmt.Errorf("%s %s in %s: %w: %s", name, strings.Join(args, " "), n.name, err, out)
	}
	return string(out), nil
}

// Shell runs a shell command in the namespace and returns its output. A failure ends the test.
func (n *NetNS) Shell(t TB, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	out, err := n.Run(ctx, "sh", "-ec", command)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return out
}

// Background runs a task in the namespace until the test ends or stop is called, and waits for it.
// An error of the task fails the test, except the end of its context.
func (n *NetNS) Background(t TB, task func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Do(func() error { return task(ctx) }) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("the task ended: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// IP runs iproute2's ip in the namespace.
func (n *NetNS) IP(args ...string) error { return ip(append([]string{"-n", n.name}, args...)...) }

// Batch runs commands of iproute2's ip in the namespace, a line each, up to the first that
// fails. The addresses of a line determine its family.
func (n *NetNS) Batch(lines ...string) error { return n.batch(nil, lines) }

// batch is Batch with options, which all lines share.
func (n *NetNS) batch(options, lines []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ip", append([]string{"-n", n.name, "-batch", "-"}, options...)...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip -batch in %s: %w: %s", n.name, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Sysctl sets a kernel parameter of the namespace, such as net.ipv4.ip_forward.
func (n *NetNS) Sysctl(key, value string) error {
	path := filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
	return n.Do(func() error {
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("sysctl %s=%s in %s: %w", key, value, n.name, err)
		}
		return nil
	})
}

// Veth lays a wire between two namespaces, both ends up.
func Veth(a *NetNS, aName string, b *NetNS, bName string) error {
	return errors.Join(vethDown(a, aName, b, bName), a.IP("link", "set", aName, "up"))
}

// vethDown is Veth with the first end down.
func vethDown(a *NetNS, aName string, b *NetNS, bName string) error {
	// Only the end that is created last, the one named first, can be up at once.
	return ip("link", "add", bName, "up", "netns", b.name, "type", "veth", "peer", "name", aName, "netns", a.name)
}

// Addr gives an interface addresses such as "10.0.0.1/24". IPv6 addresses are usable immediately
// (no duplicate address detection).
func (n *NetNS) Addr(dev string, prefixes ...string) error {
	var lines []string
	for _, p := range prefixes {
		line := "addr add " + p + " dev " + dev
		if strings.Contains(p, ":") {
			line += " nodad"
		}
		lines = append(lines, line)
	}
	return n.Batch(lines...)
}

// RemoveLeftovers removes the namespaces of processes that are gone, and ends the processes that
// still run in them.
func RemoveLeftovers() error {
	entries, err := os.ReadDir(netnsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list namespaces: %w", err)
	}
	var errs []error
	for _, e := range entries {
		m := namePattern.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		info, err := e.Info()
		if err != nil || OwnerRuns(m[1], info.ModTime()) {
			continue
		}
		n := &NetNS{name: e.Name()}
		n.endProcesses()
		errs = append(errs, n.closeLeftover())
	}
	return errors.Join(errs...)
}

// closeLeftover removes a namespace that another run may be removing concurrently. It succeeds
// once the namespace is gone.
func (n *NetNS) closeLeftover() error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	return Eventually(ctx, 20*time.Millisecond, func() error {
		err := n.Close()
		if _, gone := os.Lstat(n.Path()); errors.Is(gone, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// Processes returns the processes in the namespace, without zombies.
func (n *NetNS) Processes() ([]int, error) {
	namespace, err := os.Stat(n.Path())
	if err != nil {
		return nil, fmt.Errorf("processes in %s: %w", n.name, err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("processes in %s: %w", n.name, err)
	}
	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		// A thread of this process may be in the namespace at this moment, with Do.
		if err != nil || pid == 1 || pid == os.Getpid() {
			continue
		}
		// It fails for a process that has ended.
		have, err := os.Stat(filepath.Join("/proc", entry.Name(), "ns/net"))
		if err == nil && os.SameFile(have, namespace) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// endProcesses kills the processes in a namespace whose owner has ended or is done, and waits for
// their end. It repeats until none is left: a frontend that is ending may have restarted its BIRD.
// Failures show when the namespace is removed.
func (n *NetNS) endProcesses() {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		pids, err := n.Processes()
		if err != nil || len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func ip(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
