package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"golang.org/x/sys/unix"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/meridiotest"
	"github.com/vipgate/vipgate/test/nsptest"
)

const (
	// patience bounds every wait for a condition.
	patience = 30 * time.Second
	// podIP4 is the pod's address in the cluster network.
	podIP4 = "172.16.0.1"
)

// meridioPod is the pod of Meridio 1.2.8's template in a lab, with the frontend replaced. It has
// the user of the image, and the capabilities, volumes, variables and probes of the template. The
// load balancer and the NSP run as in Meridio.
type meridioPod struct {
	t        *testing.T
	lab      *lab.Lab
	binaries string
	image    clitest.Image
	frontend *lab.Process
	gateway  *lab.Gateway
	nsp      *nsptest.NSP
	lb       *meridiotest.LB
}

const (
	meridioGroup = 2000 // fsGroup
	meridioNSP   = "127.0.0.1:7778"
	healthSocket = "unix:///tmp/health.sock"
)

// meridioVolumes maps the volumes of the container to their mount points, the only writable paths.
var meridioVolumes = map[string]string{
	"spire-agent-socket": "/run/spire/sockets", "tmp-fe": "/tmp", "run": "/var/run/bird", "etc": "/etc/bird",
	"log": "/var/log", "lb-socket": "/var/lib/meridio",
}

var meridioEnvironment = map[string]string{
	"PATH":                   "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"SPIFFE_ENDPOINT_SOCKET": "unix:///run/spire/sockets/agent.sock",
	"NFE_NAMESPACE":          "default", "NFE_LOG_BIRD": "true", "NFE_ECMP": "true",
	"NFE_EXTERNAL_INTERFACE": lab.External, "NFE_NSP_SERVICE": meridioNSP,
	"NFE_CONFIG_MAP_NAME": "meridio-configuration-trench-a", "NFE_TRENCH_NAME": "trench-a",
	"NFE_ATTRACTOR_NAME": "attractor-a-1", "NFE_LOG_LEVEL": "", "NFE_METRICS_ENABLED": "true",
}

func newMeridioPod(t *testing.T) *meridioPod {
	t.Helper()
	if os.Geteuid() != 0 {
		lab.Skip(t, "network and mount namespaces need root")
	}
	if errs := lab.Missing(); len(errs) > 0 {
		lab.Skip(t, errs[0].Error())
	}
	p := &meridioPod{
		t: t, image: clitest.ReadImage(t, clitest.Deployments+"images/meridio-frontend.Dockerfile"),
	}
	var err error
	p.binaries, err = lab.Programs()
	p.must(err)
	p.lab, err = lab.New(lab.QuickDAD)
	p.must(err)
	t.Cleanup(func() {
		if t.Failed() && p.frontend != nil {
			t.Logf("== last lines of the frontend\n%s", p.frontend.Tail(40))
		}
		harness.Check(t, p.lab.Close())
	})
	ca := identitytest.NewCA(t, "example.org")
	p.volumes(ca)
	credentials := nsptest.ServerCredentials(ca.SVID(ca.ID("/ns/default/sa/meridio-trench-a"), time.Hour), ca.Bundle())
	host, err := os.Hostname()
	p.must(err)
	p.lb = meridiotest.New(meridiotest.Options{
		Socket: filepath.Join(p.volume("lb-socket"), "lb.sock"), Credentials: credentials, Host: host,
	})
	p.must(p.lb.Start())
	p.lb.SetAvailable(true)
	t.Cleanup(func() { p.check(p.lb.Stop()) })
	p.startNSP(nsptest.Options{Credentials: credentials, Address: meridioNSP, Listen: p.listen})
	p.gateway, err = p.lab.StartGateway(lab.GatewayA())
	p.must(err)
	return p
}

// in returns the same pod for a subtest, so that failures belong to the subtest.
func (p *meridioPod) in(t *testing.T) *meridioPod {
	c := *p
	c.t = t
	return &c
}

func (p *meridioPod) must(err error) {
	p.t.Helper()
	harness.Must(p.t, err)
}

func (p *meridioPod) check(err error) {
	harness.Check(p.t, err)
}

func (p *meridioPod) context() context.Context { return harness.Context(p.t, patience) }

func (p *meridioPod) eventually(condition func() error) {
	p.t.Helper()
	p.must(lab.Eventually(p.context(), 20*time.Millisecond, condition))
}

func (p *meridioPod) listen(network, address string) (l net.Listener, err error) {
	err = p.lab.Pod.Do(func() error {
		l, err = net.Listen(network, address)
		return err
	})
	return l, err
}

func (p *meridioPod) startNSP(o nsptest.Options) {
	p.t.Helper()
	p.nsp = nsptest.New(o)
	trench := &nspv1.Trench{Name: "trench-a"}
	a := &nspv1.Attractor{Name: "attractor-a-1", Trench: trench}
	for _, v := range []string{"20.0.0.1/32", "2000::1/128"} {
		a.Vips = append(a.Vips, &nspv1.Vip{Name: "vip-" + v, Address: v, Trench: trench})
	}
	for family, address := range map[string]string{"ipv4": lab.GatewayA4.String(), "ipv6": lab.GatewayA6.String()} {
		a.Gateways = append(a.Gateways, &nspv1.Gateway{
			Name: "gateway-" + family, Address: address, IpFamily: family, Protocol: "bgp", Trench: trench,
			RemoteAsn: lab.GatewayAS, LocalAsn: lab.PodAS, RemotePort: lab.BGPPort, LocalPort: lab.BGPPort, HoldTime: 3,
		})
	}
	p.nsp.SetAttractors(a)
	p.must(p.nsp.Start())
	p.t.Cleanup(func() { p.check(p.nsp.Stop()) })
}

// volume returns the directory of a volume on this host.
func (p *meridioPod) volume(name string) string { return filepath.Join(p.lab.Dir, name) }

// volumes creates the volumes as the kubelet does. The volume of the load balancer's socket has 1
// KiB, which the kernel rounds up to a page.
func (p *meridioPod) volumes(ca *identitytest.CA) {
	p.t.Helper()
	for name := range meridioVolumes {
		dir := p.volume(name)
		p.must(os.MkdirAll(dir, 0o755))
		if name == "lb-socket" {
			p.must(unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1k"))
			p.t.Cleanup(func() { p.check(unix.Unmount(dir, unix.MNT_DETACH)) })
		}
		if name != "spire-agent-socket" {
			p.must(os.Chown(dir, 0, meridioGroup))
			p.must(os.Chmod(dir, 0o777|os.ModeSetgid))
		}
	}
	api := identitytest.NewWorkloadAPI(p.t)
	api.Offer(ca, []*x509svid.SVID{ca.SVID(ca.ID("/ns/default/sa/meridio-trench-a"), time.Hour)})
	api.Start()
	socket := strings.TrimPrefix(api.Addr(), "unix://")
	p.must(os.Chmod(socket, 0o777))
	p.must(os.Link(socket, filepath.Join(p.volume("spire-agent-socket"), "agent.sock")))
}

// container returns the container with another command line.
func (p *meridioPod) container(arguments ...string) container.Container {
	p.t.Helper()
	user, group, _ := strings.Cut(p.image.User, ":")
	uid, err := strconv.Atoi(user)
	p.must(err)
	gid, err := strconv.Atoi(group)
	p.must(err)
	c := container.Container{
		UID: uid, GID: gid, FSGroup: meridioGroup,
		Capabilities: []string{"NET_ADMIN", "NET_BIND_SERVICE", "DAC_OVERRIDE", "NET_RAW", "SYS_PTRACE"},
		Environment:  container.Assignments(meridioEnvironment), Arguments: arguments, Dir: "/home/meridio",
		Links: map[string]string{"/home/meridio/frontend": "/usr/local/bin/frontend"},
		Programs: []container.Program{
			{Source: filepath.Join(p.binaries, "grpc_health_probe"), Path: "/bin/grpc_health_probe"},
			{Source: filepath.Join(p.binaries, "meridio-frontend"), Path: "/usr/local/bin/frontend"},
			{Source: lab.BIRD(), Path: "/usr/sbin/bird"},
		},
	}
	for i, program := range c.Programs {
		c.Programs[i].Capabilities = p.image.Capabilities[program.Path]
	}
	for name, path := range meridioVolumes {
		c.Volumes = append(c.Volumes, container.Volume{
			Source: p.volume(name), Path: path, ReadOnly: name == "spire-agent-socket",
		})
	}
	return c
}

// run runs a command line in a separate container with the volumes of the pod.
func (p *meridioPod) run(name string, arguments ...string) (string, error) {
	p.t.Helper()
	c := p.container(arguments...)
	c.Root = filepath.Join(p.lab.Dir, "root-"+name)
	p.must(os.MkdirAll(c.Root, 0o755))
	command, err := c.Command(filepath.Join(p.lab.Dir, name+".json"))
	p.must(err)
	return p.lab.Pod.Run(p.context(), command[0], command[1:]...)
}

// start starts the container with the command of its image, or restarts it after it ended.
func (p *meridioPod) start() {
	p.t.Helper()
	c := p.container(p.image.EntryPoint, "run")
	c.Root = filepath.Join(p.lab.Dir, "root")
	p.must(os.MkdirAll(c.Root, 0o755))
	command, err := c.Command(filepath.Join(p.lab.Dir, "frontend.json"))
	p.must(err)
	p.frontend, err = p.lab.Start(p.lab.Pod, "frontend", command...)
	p.must(err)
}

// exec runs a command line in the running container, as the kubelet does for a probe.
func (p *meridioPod) exec(arguments ...string) (string, error) {
	c := p.container(arguments...)
	c.PID = p.frontend.PID()
	command, err := c.Command(filepath.Join(p.lab.Dir, "exec.json"))
	p.must(err)
	return p.lab.Pod.Run(p.context(), command[0], command[1:]...)
}

// probe runs a probe with timeouts from the template, or the operator's defaults.
func (p *meridioPod) probe(service, connect, call string) error {
	out, err := p.exec("/bin/grpc_health_probe", "-addr="+healthSocket, "-service="+service,
		"-connect-timeout="+connect, "-rpc-timeout="+call)
	if err != nil {
		return fmt.Errorf("probe of %q: %w: %s", service, err, out)
	}
	return nil
}

func (p *meridioPod) wantServing(services ...string) {
	p.t.Helper()
	for _, service := range services {
		p.eventually(func() error {
			return errors.Join(p.probe(service, "400ms", "400ms"), p.probe(service, "100ms", "150ms"))
		})
	}
}

func (p *meridioPod) wantRoutes(prefixes ...string) {
	p.t.Helper()
	p.must(p.gateway.WantRoutes(p.context(), prefixes...))
}

// get fetches the metrics from another namespace.
func (p *meridioPod) get(from *lab.NetNS, address string) (body string, err error) {
	err = from.Do(func() error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(address, "2224"), 5*time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		p.must(conn.SetDeadline(time.Now().Add(5 * time.Second)))
		client := http.Client{Transport: &http.Transport{
			DialContext:       func(context.Context, string, string) (net.Conn, error) { return conn, nil },
			DisableKeepAlives: true,
		}}
		r, err := client.Get("http://pod:2224/metrics")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		data, err := io.ReadAll(r.Body)
		body = string(data)
		return err
	})
	return body, err
}

// The image replaces Meridio's frontend without any other change.
func TestMeridioPod(t *testing.T) {
	p := newMeridioPod(t)
	vips := []string{"20.0.0.1/32", "2000::1/128"}

	// Another container of the pod may create the external interface later. Until then the probe of
	// the process must serve, or the kubelet would restart the container.
	p.must(p.lab.Pod.Batch("link set "+lab.External+" down", "link set "+lab.External+" name later0"))
	p.start()
	p.wantServing("", "Liveness")
	harness.WantError(t, p.probe("Readiness", "400ms", "400ms"), "not serving")
	p.must(p.lab.Pod.Batch("link set later0 name "+lab.External, "link set "+lab.External+" up"))
	p.must(p.lab.Pod.Addr(lab.External, lab.PodExternal6.String()+"/64")) // a link that is down keeps IPv4 only
	p.wantRoutes(vips...)
	p.wantServing("Readiness")
	p.must(p.nsp.WaitTargets(p.context(), func(targets []*nspv1.Target) bool { return len(targets) == 1 }))

	t.Run("tools", func(t *testing.T) { p.in(t).testTools(t) })
	t.Run("debug document", func(t *testing.T) { p.in(t).testDebug(t) })
	t.Run("metrics", func(t *testing.T) {
		p := p.in(t)
		if page, err := p.get(p.lab.Backend, podIP4); err != nil || !strings.Contains(page, "vipgate_frontend_") {
			t.Errorf("at the pod's address: %v, %.200s", err, page)
		}
		for _, external := range []string{lab.PodExternal4.String(), lab.PodExternal6.String()} {
			if page, err := p.get(p.lab.Gateway, external); err == nil {
				t.Errorf("at the external address %s: %.200s", external, page)
			}
		}
	})
	t.Run("signals", func(t *testing.T) {
		p := p.in(t)
		for _, step := range []struct {
			signal unix.Signal
			want   string
		}{{unix.SIGUSR2, `"to":"debug"`}, {unix.SIGUSR1, `"to":"info"`}} {
			p.must(p.frontend.Signal(step.signal))
			p.eventually(func() error {
				if out := p.frontend.Output(); !strings.Contains(out, step.want) {
					return fmt.Errorf("no %s after %v", step.want, step.signal)
				}
				return nil
			})
		}
	})

	// A killed container leaves sockets and BIRD's files. The next container starts from the cached
	// configuration while the NSP is down.
	p.must(p.nsp.Stop())
	p.must(p.frontend.Kill())
	p.killBIRD()
	p.wantRoutes()
	p.start()
	p.wantRoutes(vips...)
	p.wantServing("", "Liveness", "Readiness")
	p.must(p.nsp.Start())
	p.wantFiles("lb-socket", "lb.sock")

	p.check(lab.Stop(p.context(), p.frontend))
	p.wantRoutes()
	p.must(p.nsp.WaitTargets(p.context(), func(targets []*nspv1.Target) bool { return len(targets) == 0 }))
	t.Run("debug document of no frontend", func(t *testing.T) {
		out, err := p.in(t).run("debug", "./frontend", "--debug")
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		wantDocument(t, out)
	})
	p.wantFiles("tmp-fe")
}

// The image has the user, the paths and the capabilities that Meridio's pod allows.
func TestMeridioImageFitsPod(t *testing.T) {
	image := clitest.ReadImage(t, clitest.Deployments+"images/meridio-frontend.Dockerfile")
	if image.User != "10001:10001" || image.EntryPoint != "./frontend" {
		t.Errorf("user %s, entry point %s", image.User, image.EntryPoint)
	}
	allowed := []string{"DAC_OVERRIDE", "NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SYS_PTRACE"}
	const program = "/usr/local/bin/frontend"
	if len(image.Capabilities) != 1 || len(image.Capabilities[program]) == 0 {
		t.Errorf("file capabilities %v, want those of the frontend alone: BIRD inherits them", image.Capabilities)
	}
	for _, capability := range image.Capabilities[program] {
		if !slices.Contains(allowed, capability) {
			t.Errorf("%s has %s: the pod does not start it", program, capability)
		}
	}
	patch := clitest.ReadPod(t, "meridio/swap.yaml")
	c := patch.Container(t, "frontend")
	if len(patch.Containers) != 1 || c.Image != "vipgate/meridio-frontend" || len(c.Env) > 0 {
		t.Errorf("the patch changes more than one image: %+v", patch.Containers)
	}
}

func (p *meridioPod) testTools(t *testing.T) {
	for want, arguments := range map[string][]string{
		"NBR-gateway-ipv4": {"/usr/sbin/birdc", "-s", "/var/run/bird/bird.ctl", "show", "protocols"},
		"20.0.0.1/32":      {"./frontend", "status"},
		"State changed":    {"/usr/bin/cat", "/var/log/bird.log"},
		"gateway-ipv6":     {"./frontend", "status", "--output=json"},
	} {
		if out, err := p.exec(arguments...); err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, no %q in %s", strings.Join(arguments, " "), err, want, out)
		}
	}
	info, err := os.Stat(filepath.Join(p.volume("etc"), "nsp.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the list of the NSP: %v, %v", info, err)
	}
}

func (p *meridioPod) testDebug(t *testing.T) {
	for _, flag := range []string{"--debug", "-debug"} {
		out, err := p.exec("./frontend", flag)
		if err != nil {
			t.Fatalf("%s: %v: %s", flag, err, out)
		}
		wantDocument(t, out)
	}
}

func wantDocument(t *testing.T, out string) {
	t.Helper()
	var document struct {
		Interfaces  []struct{ Name string } `json:"network-interfaces"`
		Rules       []struct{ Table int }
		Environment []string `json:"environment-variables"`
	}
	if err := json.Unmarshal([]byte(out), &document); err != nil {
		t.Fatalf("%v: %.200s", err, out)
	}
	if !slices.ContainsFunc(document.Interfaces, func(i struct{ Name string }) bool { return i.Name == lab.External }) ||
		len(document.Rules) == 0 || !slices.Contains(document.Environment, "NFE_ATTRACTOR_NAME=attractor-a-1") {
		t.Errorf("the document is %.400s", out)
	}
}

// killBIRD kills BIRD, as the kernel does at the end of the container's PID namespace.
func (p *meridioPod) killBIRD() {
	p.t.Helper()
	text, err := os.ReadFile(filepath.Join(p.volume("run"), "bird.ctl.pid"))
	p.must(err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	p.must(err)
	p.must(unix.Kill(pid, unix.SIGKILL))
}

// wantFiles compares the files of a volume.
func (p *meridioPod) wantFiles(volume string, want ...string) {
	p.t.Helper()
	entries, err := os.ReadDir(p.volume(volume))
	p.must(err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		p.t.Errorf("volume %s has %v, want %v", volume, got, want)
	}
}
