package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	patience = 20 * time.Second
	// answerTime is how long a client waits for a connection, or for its echo.
	answerTime = 2 * time.Second

	targetAddress = "172.16.1.1"
	podA, podB    = "172.16.0.1", "172.16.0.2"
	vip4, vip6    = "20.0.0.1", "2000::1"
	port          = "5000"
)

// fixture connects a client through two trench pods, which forward to one target without load
// balancing.
type fixture struct {
	t                    *testing.T
	dir, programs        string
	pod                  clitest.Pod
	image                clitest.Image
	client, a, b, target *lab.NetNS
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	if os.Geteuid() != 0 {
		lab.Skip(t, "network and mount namespaces need root")
	}
	lab.Need(t, "ip", "nft")
	dir, err := os.MkdirTemp("/tmp", "vg-target") // short, since paths of unix sockets end at 108 bytes
	harness.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	programs, err := lab.Programs()
	harness.Must(t, err)
	target := deployed(t)
	f := &fixture{t: t, dir: dir, programs: programs, pod: clitest.ReadPod(t, target.Manifest), image: target.Image(t)}
	for _, ns := range []**lab.NetNS{&f.client, &f.a, &f.b, &f.target} {
		*ns = lab.NewNetNS(t, lab.WithoutDAD)
	}
	f.wire(lab.NewNetNS(t, lab.WithoutDAD))
	f.mkdir("run", 0o777|os.ModeSetgid)
	f.must(os.Chown(filepath.Join(dir, "run"), 0, int(f.pod.SecurityContext.FSGroup)))
	f.echo()
	return f
}

func (f *fixture) binary() string { return filepath.Join(f.programs, "target") }

func (f *fixture) must(err error) {
	f.t.Helper()
	harness.Must(f.t, err)
}

func (f *fixture) mkdir(name string, mode os.FileMode) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	f.must(os.MkdirAll(path, 0o755))
	f.must(os.Chmod(path, mode))
	return path
}

// wire connects the pods and the target by a switch, and the client with each pod. The pods drop
// what connection tracking calls invalid, such as replies to requests of the other pod.
func (f *fixture) wire(network *lab.NetNS) {
	f.t.Helper()
	f.must(network.Batch("link add br0 type bridge", "link set br0 up"))
	for i, ns := range []*lab.NetNS{f.a, f.b, f.target} {
		wire := fmt.Sprintf("port%d", i)
		f.must(lab.Veth(network, wire, ns, "targets"))
		f.must(network.IP("link", "set", wire, "master", "br0"))
	}
	f.must(f.target.Addr("targets", targetAddress+"/16", "fd00:16::1:1/64"))
	f.must(f.client.Addr("lo", "10.9.0.1/32", "fd09::1/128"))
	for i, ns := range []*lab.NetNS{f.a, f.b} {
		name := fmt.Sprintf("pod%d", i)
		f.must(lab.Veth(f.client, name, ns, "client"))
		f.must(f.client.Addr(name, fmt.Sprintf("10.%d.0.2/24", i), fmt.Sprintf("fd01:%d::2/64", i)))
		f.must(ns.Addr("client", fmt.Sprintf("10.%d.0.1/24", i), fmt.Sprintf("fd01:%d::1/64", i)))
		f.must(ns.Addr("targets", fmt.Sprintf("172.16.0.%d/16", i+1), fmt.Sprintf("fd00:16::%d/64", i+1)))
		f.must(ns.Sysctl("net.ipv4.ip_forward", "1"))
		f.must(ns.Sysctl("net.ipv6.conf.all.forwarding", "1"))
		f.must(ns.Batch(
			"route add 20.0.0.0/24 via "+targetAddress, "route add 2000::/64 via fd00:16::1:1",
			fmt.Sprintf("route add 10.9.0.1 via 10.%d.0.2", i), fmt.Sprintf("route add fd09::1 via fd01:%d::2", i),
		))
		_, err := ns.Run(f.context(), "nft", "add table inet f; "+
			"add chain inet f c { type filter hook forward priority 0; }; add rule inet f c ct state invalid drop")
		f.must(err)
	}
	f.via(0)
}

// via makes the client send to the VIPs through a pod.
func (f *fixture) via(pod int) {
	f.t.Helper()
	f.must(f.client.Batch(
		fmt.Sprintf("route replace 20.0.0.0/24 via 10.%d.0.1 src 10.9.0.1", pod),
		fmt.Sprintf("route replace 2000::/64 via fd01:%d::1 src fd09::1", pod),
	))
}

// echo runs the application: an echo server on every address.
func (f *fixture) echo() {
	f.t.Helper()
	var listener net.Listener
	f.must(f.target.Do(func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(f.t.Context(), "tcp", ":"+port)
		return err
	}))
	var open sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	open.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(ctx, func() { _ = c.Close() })
			open.Go(func() {
				_, _ = io.Copy(c, c)
				stop()
				_ = c.Close()
			})
		}
	})
	f.t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		open.Wait()
	})
}

// flow is a connection of the client to a VIP.
type flow struct{ net.Conn }

func (f *fixture) dial(address string) (flow, error) {
	var c net.Conn
	err := f.client.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: answerTime}).DialContext(f.t.Context(), "tcp", address)
		return err
	})
	return flow{c}, err
}

// use returns an error unless the application answers.
func (c flow) use() error {
	if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "hello\n"); err != nil {
		return err
	}
	_, err := bufio.NewReaderSize(c, 16).ReadString('\n')
	return err
}

// request uses a new flow.
func (f *fixture) request(vip string) error {
	c, err := f.dial(net.JoinHostPort(vip, port))
	if err != nil {
		return err
	}
	return errors.Join(c.use(), c.Close())
}

// wantTraffic makes requests to both VIPs through both pods.
func (f *fixture) wantTraffic(when string) {
	f.t.Helper()
	for pod := range 2 {
		f.via(pod)
		for _, vip := range []string{vip4, vip6} {
			if err := f.request(vip); err != nil {
				f.t.Errorf("%s, %s through pod %d: %v", when, vip, pod, err)
			}
		}
	}
	f.via(0)
}

func (f *fixture) context() context.Context { return harness.Context(f.t, patience) }

func (f *fixture) eventually(condition func() error) {
	f.t.Helper()
	f.must(lab.Eventually(f.context(), 20*time.Millisecond, condition))
}

// container returns the container of the manifest with the arguments and additional variables.
func (f *fixture) container(variables map[string]string, arguments ...string) *container.Container {
	f.t.Helper()
	m := f.pod.Container(f.t, "target")
	values := m.Values(map[string]string{"status.podIP": targetAddress})
	for name, value := range variables {
		values[name] = value
	}
	c := &container.Container{
		Root: f.mkdir("root", 0o755),
		UID:  int(m.SecurityContext.RunAsUser), GID: int(m.SecurityContext.RunAsGroup),
		FSGroup: int(f.pod.SecurityContext.FSGroup), Capabilities: m.SecurityContext.Capabilities.Add,
		Environment: container.Assignments(values), Arguments: append([]string{f.image.EntryPoint}, arguments...),
		Programs: []container.Program{{
			Source: f.binary(), Path: f.image.EntryPoint, Capabilities: f.image.Capabilities[f.image.EntryPoint],
		}},
	}
	for _, v := range m.VolumeMounts {
		c.Volumes = append(c.Volumes,
			container.Volume{Source: filepath.Join(f.dir, "run"), Path: v.MountPath, ReadOnly: v.ReadOnly})
	}
	return c
}

// start starts target run as the manifest has it, and waits until it is ready.
func (f *fixture) start(arguments ...string) *lab.Process {
	f.t.Helper()
	c := f.container(nil, append([]string{"run"}, arguments...)...)
	command, err := c.Command(filepath.Join(f.dir, "container.json"))
	f.must(err)
	p, err := lab.StartProcess(f.target, f.dir, "target", command...)
	f.must(err)
	f.t.Cleanup(func() {
		harness.Check(f.t, p.Kill())
		if f.t.Failed() {
			f.t.Logf("last lines of target:\n%s", p.Tail(30))
		}
	})
	f.eventually(func() error {
		_, err := f.ask(f.target, "127.0.0.1", "Readiness")
		return err
	})
	return p
}

// stop ends a process with SIGTERM.
func (f *fixture) stop(p *lab.Process) {
	f.t.Helper()
	if err := lab.Stop(f.context(), p); err != nil {
		f.t.Fatalf("%v\n%s", err, p.Tail(5))
	}
}

// run runs a command of target in a new container, and returns its output.
func (f *fixture) run(c *container.Container) (string, error) {
	f.t.Helper()
	command, err := c.Command(filepath.Join(f.dir, "command.json"))
	f.must(err)
	return f.target.Run(f.context(), command[0], command[1:]...)
}

// ask asks a health service from a namespace.
func (f *fixture) ask(from *lab.NetNS, host, service string) (string, error) {
	return from.Run(f.context(), f.binary(), "healthcheck", "--health-address="+host, "--service="+service)
}

// status returns the status of the running process, and the error of the command's exit status.
func (f *fixture) status(p *lab.Process) (*targetadminv1.Status, error) {
	f.t.Helper()
	c := f.container(nil, "status", "--output=json")
	c.PID = p.PID()
	text, failed := f.run(c)
	s := &targetadminv1.Status{}
	if err := protojson.Unmarshal([]byte(text), s); err != nil {
		f.t.Fatalf("%v: %s", err, text)
	}
	return s, failed
}

// kernelState dumps rules, routes, neighbors and nftables of the target's namespace.
func (f *fixture) kernelState() string {
	f.t.Helper()
	var all strings.Builder
	for _, command := range []string{
		"ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all",
		"ip neighbor show nud permanent", "nft list ruleset",
	} {
		words := strings.Fields(command)
		out, err := f.target.Run(f.context(), words[0], words[1:]...)
		f.must(err)
		all.WriteString(out)
	}
	return all.String()
}
