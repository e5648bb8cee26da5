package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// patience bounds every wait for a condition.
const patience = 30 * time.Second

// podIP4 is the pod's address in the cluster network.
const podIP4 = "172.16.0.1"

// birdFile is BIRD in the images of the frontend.
const birdFile = "/usr/sbin/bird"

// pod is the Deployment's pod in a lab without a cluster. It has the same users, groups,
// capabilities, mounts and variables.
type pod struct {
	t        *testing.T
	lab      *lab.Lab
	spec     clitest.Pod
	binaries string
	images   map[string]clitest.Image
	running  map[string]*lab.Process
	gateway  *lab.Gateway
}

func newPod(t *testing.T) *pod {
	t.Helper()
	if os.Geteuid() != 0 {
		lab.Skip(t, "network and mount namespaces need root")
	}
	if errs := lab.Missing(); len(errs) > 0 {
		lab.Skip(t, errs[0].Error())
	}
	p := &pod{
		t: t, spec: clitest.ReadPod(t, "base/deployment.yaml"), running: map[string]*lab.Process{},
		images: map[string]clitest.Image{
			"lb":       clitest.ReadImage(t, clitest.Deployments+"images/lb.Dockerfile"),
			"frontend": clitest.ReadImage(t, clitest.Deployments+"images/frontend.Dockerfile"),
		},
	}
	var err error
	p.binaries, err = lab.Programs()
	p.must(err)
	p.lab, err = lab.New(lab.QuickDAD)
	p.must(err)
	t.Cleanup(p.close)
	return p
}

func (p *pod) close() {
	if p.t.Failed() {
		for name, process := range p.running {
			p.t.Logf("== last lines of %s\n%s", name, process.Tail(40))
		}
	}
	harness.Check(p.t, p.lab.Close())
}

func (p *pod) must(err error) {
	p.t.Helper()
	harness.Must(p.t, err)
}

func (p *pod) context() context.Context { return harness.Context(p.t, patience) }

func (p *pod) eventually(condition func() error) {
	p.t.Helper()
	p.must(lab.Eventually(p.context(), 20*time.Millisecond, condition))
}

// volume returns the directory of a volume on this host.
func (p *pod) volume(name string) string { return filepath.Join(p.lab.Dir, "volumes", name) }

// volumes creates the volumes as the kubelet does. Every user can write to an emptyDir, and new
// files in it inherit the group fsGroup.
func (p *pod) volumes(api *identitytest.WorkloadAPI) {
	p.t.Helper()
	for _, v := range p.spec.Volumes {
		dir := p.volume(v.Name)
		p.must(os.MkdirAll(dir, 0o755))
		switch {
		case v.EmptyDir != nil:
			p.must(os.Chown(dir, 0, int(p.spec.SecurityContext.FSGroup)))
			p.must(os.Chmod(dir, 0o777|os.ModeSetgid))
			if v.Name == "trench" {
				p.writeTrench(dir)
			}
		case v.Projected != nil: // the token of kube, which does not run here
		case v.CSI != nil:
			socket := strings.TrimPrefix(api.Addr(), "unix://")
			p.must(os.Chmod(socket, 0o777))
			name := path.Base(p.spec.Container(p.t, "lb").Variable("SPIFFE_ENDPOINT_SOCKET"))
			p.must(os.Link(socket, filepath.Join(dir, name)))
		default:
			p.t.Fatalf("volume %s is of an unknown kind", v.Name)
		}
	}
}

// writeTrench writes the trench file as kube does, owned by kube's user and readable by the group.
func (p *pod) writeTrench(dir string) {
	p.t.Helper()
	file := filepath.Join(dir, path.Base(p.spec.Container(p.t, "kube").Variable("VIPGATE_TRENCH_FILE")))
	p.must(os.WriteFile(file, trenchFile(p.t), 0o640))
	user := p.spec.Container(p.t, "kube").SecurityContext.RunAsUser
	p.must(os.Chown(file, int(user), int(p.spec.SecurityContext.FSGroup)))
}

// container returns a container of the manifest, which runs its image's program with these
// arguments.
func (p *pod) container(name string, arguments ...string) container.Container {
	p.t.Helper()
	m, image := p.spec.Container(p.t, name), p.images[name]
	variables := m.Values(map[string]string{
		"status.podIP": podIP4,
		"metadata.uid": "9bd8b8f5-0f2c-4d4f-8f0e-0d2f6f1c9a11",
	})
	variables["PATH"] = "/usr/local/bin:/usr/sbin:/usr/bin"
	c := container.Container{
		UID: int(m.SecurityContext.RunAsUser), GID: int(m.SecurityContext.RunAsGroup),
		FSGroup:      int(p.spec.SecurityContext.FSGroup),
		Capabilities: m.SecurityContext.Capabilities.Add,
		NoNewPrivs:   m.SecurityContext.AllowPrivilegeEscalation != nil && !*m.SecurityContext.AllowPrivilegeEscalation,
		Environment:  container.Assignments(variables), Arguments: append([]string{image.EntryPoint}, arguments...),
		Programs: []container.Program{{
			Source: filepath.Join(p.binaries, name), Path: image.EntryPoint,
			Capabilities: image.Capabilities[image.EntryPoint], Raised: image.Raised,
		}},
	}
	if name == "frontend" {
		c.Programs = append(c.Programs, container.Program{
			Source: lab.BIRD(), Path: birdFile, Capabilities: image.Capabilities[birdFile],
		})
	}
	for _, v := range m.VolumeMounts {
		c.Volumes = append(c.Volumes, container.Volume{Source: p.volume(v.Name), Path: v.MountPath, ReadOnly: v.ReadOnly})
	}
	return c
}

// command returns the command that starts a container.
func (p *pod) command(name string, c container.Container) []string {
	p.t.Helper()
	command, err := c.Command(filepath.Join(p.lab.Dir, name+".json"))
	p.must(err)
	return command
}

// start starts a container with the arguments of the manifest, or restarts it after it ended.
func (p *pod) start(name string) {
	p.t.Helper()
	c := p.container(name, p.spec.Container(p.t, name).Args...)
	c.Root = filepath.Join(p.lab.Dir, "root-"+name)
	p.must(os.MkdirAll(c.Root, 0o755))
	var err error
	p.running[name], err = p.lab.Start(p.lab.Pod, name, p.command(name, c)...)
	p.must(err)
}

// exec runs another process of the program in a running container, as `kubectl exec` does.
func (p *pod) exec(name string, arguments ...string) (string, error) {
	c := p.container(name, arguments...)
	c.PID = p.running[name].PID()
	command := p.command("exec-"+name, c)
	return p.lab.Pod.Run(p.context(), command[0], command[1:]...)
}

// wantStatus compares the credentials of a process with its container.
func (p *pod) wantStatus(what string, pid int, name string) {
	p.t.Helper()
	s := p.spec.Container(p.t, name).SecurityContext
	mask := func(names []string) string { return fmt.Sprintf("%016x", container.Mask(names)) }
	image := p.images[name]
	noNewPrivs := "0"
	if s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation {
		noNewPrivs = "1"
	}
	want := container.Status{
		UID: strconv.FormatInt(s.RunAsUser, 10), GID: strconv.FormatInt(s.RunAsGroup, 10),
		Effective: mask(image.Capabilities[image.EntryPoint]), Bounding: mask(s.Capabilities.Add), NoNewPrivs: noNewPrivs,
	}
	got, err := container.ReadStatus(pid)
	p.must(err)
	if got != want {
		p.t.Errorf("%s: %+v, want %+v", what, got, want)
	}
}

func (p *pod) wantRoutes(prefixes ...string) {
	p.t.Helper()
	p.must(p.gateway.WantRoutes(p.context(), prefixes...))
}

func (p *pod) sysctl(name string) string {
	p.t.Helper()
	var value []byte
	p.must(p.lab.Pod.Do(func() (err error) {
		value, err = os.ReadFile("/proc/sys/net/" + name)
		return err
	}))
	return strings.TrimSpace(string(value))
}

// initialize performs the steps of the init container in the pod's network namespace.
func (p *pod) initialize() {
	p.t.Helper()
	if n := len(p.spec.InitContainers); n != 2 || p.spec.InitContainers[1].RestartPolicy != "Always" {
		p.t.Fatalf("%d init containers; want that of the sysctls and kube", n)
	}
	c := p.spec.InitContainers[0]
	if !c.SecurityContext.Privileged {
		p.t.Errorf("%s is not privileged: /proc/sys is read-only", c.Name)
	}
	_, err := p.lab.Pod.Run(p.context(), c.Command[0], append(c.Command[1:], c.Args...)...)
	p.must(err)
}

// The programs run as specified by the manifests and Dockerfiles: as non-root users on read-only
// root file systems, with file capabilities, volumes of a common group, and SVIDs of the Workload
// API. Only Kubernetes itself, the network plugins and the image builds need a real cluster.
func TestThePodRunsAsTheManifestsSay(t *testing.T) {
	t.Parallel()
	p := newPod(t)
	ca := identitytest.NewCA(t, "example.org")
	api := identitytest.NewWorkloadAPI(t)
	// Both programs receive both SVIDs; --spiffe-id selects one.
	api.Offer(ca, []*x509svid.SVID{
		ca.SVID(ca.ID("/trench-a/frontend"), time.Hour),
		ca.SVID(ca.ID("/trench-a/lb"), time.Hour),
	})
	api.Start()
	p.volumes(api)
	// The host of both targets accepts the VIPs, and replies through the pod.
	p.must(p.lab.Backend.Batch("route add local 20.0.0.1 dev lo", "route add local 2000::1 dev lo",
		"route add default via 172.16.0.1", "route add default via fd00:16::1"))
	target := lab.NewTarget(p.lab.Backend, netip.AddrPortFrom(netip.IPv6Unspecified(), 5000))
	p.must(target.Up())
	t.Cleanup(func() {
		harness.Check(t, target.Down())
	})
	var err error
	p.gateway, err = p.lab.StartGateway(lab.GatewayA())
	p.must(err)

	p.initialize()
	p.start("lb")
	p.start("frontend")
	vips := []string{"20.0.0.1/32", "2000::1/128"}
	p.wantRoutes(vips...)

	for _, c := range p.spec.Containers {
		p.wantStatus(c.Name, p.running[c.Name].PID(), c.Name)
		// The kubelet probes from outside of the pod.
		for _, probe := range []*clitest.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			p.eventually(func() error {
				_, err := p.lab.Backend.Run(p.context(), filepath.Join(p.binaries, c.Name), "healthcheck",
					fmt.Sprintf("--health-address=%s:%d", podIP4, probe.GRPC.Port), "--service="+probe.GRPC.Service)
				return err
			})
		}
		for _, command := range []string{"status", "validate", "healthcheck"} {
			if out, err := p.exec(c.Name, command); err != nil {
				t.Errorf("%s %s in the container: %v\n%s", c.Name, command, err, out)
			}
		}
	}
	pid, err := os.ReadFile(filepath.Join(p.volume("bird-run"), "bird.ctl.pid"))
	p.must(err)
	bird, err := strconv.Atoi(strings.TrimSpace(string(pid)))
	p.must(err)
	p.wantStatus("BIRD", bird, "frontend")
	// BIRD inherits its capabilities, so the frontend may set options of its sockets.
	p.eventually(func() error {
		out, err := p.exec("frontend", "status", "-o", "json")
		if err == nil && strings.Count(out, `"noDelay": true`) != 2 {
			err = fmt.Errorf("not both sessions have TCP_NODELAY:\n%s", out)
		}
		return err
	})

	info, err := os.Stat(filepath.Join(p.volume("readiness"), "lb.sock"))
	p.must(err)
	if group := info.Sys().(*syscall.Stat_t).Gid; int64(group) != p.spec.SecurityContext.FSGroup ||
		info.Mode().Perm() != 0o660 {
		t.Errorf("the readiness socket has mode %v and group %d", info.Mode(), group)
	}

	// A restarted container finds the files of its predecessor. BIRD ends with the PID namespace of
	// the frontend's container.
	for _, name := range []string{"lb", "frontend"} {
		p.must(p.running[name].Kill())
		if name == "frontend" {
			p.must(unix.Kill(bird, unix.SIGKILL))
		}
		p.wantRoutes()
		p.start(name)
		p.wantRoutes(vips...)
	}

	ctx := harness.Context(t, time.Duration(p.spec.GracePeriodSeconds)*time.Second)
	p.must(lab.Stop(ctx, p.running["lb"], p.running["frontend"]))
	p.wantRoutes()
}

// Without privilege escalation the kernel ignores file capabilities, as a comment in the manifest
// states. The frontend starts without any: with an external speaker it needs none.
func TestTheFrontendRaisesItsCapabilities(t *testing.T) {
	t.Parallel()
	p := newPod(t)
	api := identitytest.NewWorkloadAPI(t)
	api.Start()
	p.volumes(api)
	for _, tt := range []struct {
		name, argument string
		spoil          func(*container.Container)
		problem        string
	}{
		{"as the manifest has it", "cleanup", func(*container.Container) {}, ""},
		{"with no_new_privs", "cleanup", func(c *container.Container) { c.NoNewPrivs = true }, "operation not permitted"},
		{"without NET_ADMIN", "cleanup", func(c *container.Container) {
			c.Capabilities = []string{"NET_BIND_SERVICE", "NET_RAW"}
		}, "operation not permitted"},
		{"without any", "validate", func(c *container.Container) { c.Capabilities, c.NoNewPrivs = nil, true }, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := p.container("frontend", tt.argument)
			c.Root = filepath.Join(p.lab.Dir, "root")
			p.must(os.MkdirAll(c.Root, 0o755))
			tt.spoil(&c)
			command := p.command("spoiled", c)
			out, err := p.lab.Pod.Run(p.context(), command[0], command[1:]...)
			if (err != nil) != (tt.problem != "") || !strings.Contains(out, tt.problem) {
				t.Errorf("got %v, %s", err, out)
			}
		})
	}
}

// The tuning plugin sets the same sysctls, so no init container is needed.
func TestForwardingIsSet(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*testing.T, *pod){
		"by the init container": func(_ *testing.T, p *pod) { p.initialize() },
		"by the tuning plugin":  func(t *testing.T, p *pod) { p.tune(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testForwarding(t, set)
		})
	}
}

// tune sets the sysctls of the example's networks after their interfaces are created, as the
// tuning plugin does.
func (p *pod) tune(t *testing.T) {
	for i, file := range []string{"network.yaml", "targets-network.yaml"} {
		n := networks(t)[i]
		for name, value := range readNetwork(t, example+file, n.Name).sysctls {
			inside := map[string]string{"eth0": lab.Internal, "IFNAME": lab.External, "targets": lab.Internal}
			if i == 1 {
				inside["IFNAME"] = lab.Internal
			}
			words := strings.Split(name, ".")
			for w := range words {
				if here, ok := inside[words[w]]; ok {
					words[w] = here
				}
			}
			p.must(p.lab.Pod.Sysctl(strings.Join(words, "."), value))
		}
	}
}

func testForwarding(t *testing.T, set func(*testing.T, *pod)) {
	p := newPod(t)
	before := map[string]string{
		"ipv4/ip_forward": "0", "ipv4/conf/all/rp_filter": "1", "ipv4/conf/default/rp_filter": "2",
		"ipv4/conf/ext-vlan/rp_filter": "1",
		"ipv6/conf/all/forwarding":     "0", "ipv4/fib_multipath_hash_policy": "0", "ipv6/fib_multipath_hash_policy": "0",
		"netfilter/nf_conntrack_tcp_be_liberal": "0",
	}
	for name, value := range before {
		p.must(p.lab.Pod.Sysctl("net."+strings.ReplaceAll(name, "/", "."), value))
	}
	set(t, p)
	for name, want := range map[string]string{
		"ipv4/ip_forward": "1", "ipv4/conf/ext-vlan/forwarding": "1", "ipv6/conf/all/forwarding": "1",
		"ipv6/conf/ext-vlan/forwarding": "1",
		"ipv4/conf/all/rp_filter":       "0", "ipv4/conf/default/rp_filter": "0", "ipv4/conf/ext-vlan/rp_filter": "0",
		"ipv4/fib_multipath_hash_policy": "1", "ipv6/fib_multipath_hash_policy": "1",
		"netfilter/nf_conntrack_tcp_be_liberal": "1",
	} {
		if got := p.sysctl(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}
