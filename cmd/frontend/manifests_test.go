package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

const (
	base       = clitest.Deployments + "base/"
	example    = clitest.Deployments + "example/"
	components = clitest.Deployments + "components/"
)

func deployment(t *testing.T) clitest.Deployment {
	return clitest.Read[clitest.Deployment](t, base+"deployment.yaml")
}

func deployed(t *testing.T) *clitest.Program {
	return &clitest.Program{Name: "frontend", Manifest: "base/deployment.yaml", CommandLine: clitest.CommandLine{
		Parser: parser(t),
		Services: []string{
			"", frontend.Liveness, frontend.Readiness, frontend.Egress, frontend.Configuration, frontend.Identity,
			frontend.BIRD, frontend.Stream, frontend.Routing, frontend.Stopping,
		},
		Variables: []string{"GOMEMLIMIT", "SPIFFE_ENDPOINT_SOCKET", "POD_UID"},
		Reads:     []string{"trench-file", "lb-socket"},
	}}
}

func TestContainerAndImageFitProgram(t *testing.T) {
	p := deployed(t)
	p.Fits(t)
	image := p.Image(t)
	// BIRD inherits the capabilities of the frontend.
	if len(image.Capabilities) != 1 || len(image.Capabilities[image.EntryPoint]) == 0 {
		t.Errorf("file capabilities %v, want those of the frontend alone", image.Capabilities)
	}
	if !slices.Contains(p.Container(t).SecurityContext.Capabilities.Add, "SYS_PTRACE") {
		t.Error("RuntimeDefault denies pidfd_getfd(2) without SYS_PTRACE: no TCP_NODELAY for BIRD")
	}
}

func TestMistakesInTheImageAreSeen(t *testing.T) {
	yes, no := true, false
	for _, tt := range []struct {
		name  string
		spoil func(*clitest.Container)
		want  string
	}{
		{
			"no_new_privs", func(c *clitest.Container) { c.SecurityContext.AllowPrivilegeEscalation = &no },
			"allowPrivilegeEscalation is false",
		},
		{
			"a capability fewer",
			func(c *clitest.Container) {
				c.SecurityContext.Capabilities.Add = []string{"NET_ADMIN", "NET_RAW", "SYS_PTRACE"}
			}, "the container allows [NET_ADMIN NET_RAW]",
		},
		{"a capability more", func(c *clitest.Container) {
			c.SecurityContext.Capabilities.Add = append(c.SecurityContext.Capabilities.Add, "SYS_ADMIN")
		}, "SYS_ADMIN"},
		{"another user", func(c *clitest.Container) { c.SecurityContext.RunAsUser = 1 }, "the image's user is 10002:10002"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := deployed(t)
			c := p.Container(t)
			tt.spoil(c)
			clitest.WantProblem(t, c.ImageProblems(p.Image(t)), tt.want)
		})
	}
	t.Run("capabilities without files that have them", func(t *testing.T) {
		c := deployed(t).Container(t)
		c.SecurityContext.AllowPrivilegeEscalation = &yes
		if problems := c.ImageProblems(clitest.Image{User: "10002:10002"}); len(problems) != 2 {
			t.Errorf("got %q", problems)
		}
	})
}

func TestThePodIsConsistent(t *testing.T) {
	d := deployment(t)
	for _, problem := range d.Spec.Template.Spec.Problems() {
		t.Error(problem)
	}
	labels := d.Spec.Template.Metadata.Labels
	budget := clitest.Read[struct {
		Spec struct{ Selector clitest.LabelSelector }
	}](t, base+"poddisruptionbudget.yaml")
	selectors := map[string]clitest.LabelSelector{
		"Deployment":          d.Spec.Selector,
		"PodDisruptionBudget": budget.Spec.Selector,
	}
	for i, a := range d.Spec.Template.Spec.Affinity.PodAntiAffinity.Preferred {
		selectors["anti-affinity "+strconv.Itoa(i)] = a.PodAffinityTerm.LabelSelector
	}
	for i, s := range d.Spec.Template.Spec.Spread {
		selectors["topology spread "+strconv.Itoa(i)] = s.LabelSelector
	}
	if len(selectors) != 4 {
		t.Errorf("got %d selectors", len(selectors))
	}
	for of, s := range selectors {
		if len(s.MatchLabels) == 0 {
			t.Errorf("%s selects every pod", of)
		}
		for k, v := range s.MatchLabels {
			if labels[k] != v {
				t.Errorf("%s selects %s=%s, which the pod has not", of, k, v)
			}
		}
	}
	name := readTrench(t, base+"trench.yaml").Metadata.Name
	kube := d.Spec.Template.Spec.Container(t, "kube")
	if label := labels["vipgate.io/trench-pod"]; label != name || kube.Variable("VIPGATE_TRENCH") != name {
		t.Errorf("the pod has the label %q, its Trench is %q", label, name)
	}
	defaultContainer := d.Spec.Template.Metadata.Annotations["kubectl.kubernetes.io/default-container"]
	if d.Spec.Template.Spec.Container(t, defaultContainer).RestartPolicy != "" {
		t.Errorf("kubectl exec goes to %s", defaultContainer)
	}
}

func TestMistakesInThePodAreSeen(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(*clitest.Pod)
		want  string
	}{
		{"service links", func(p *clitest.Pod) { p.EnableServiceLinks = nil }, "enableServiceLinks"},
		{
			"a volume that is not mounted", func(p *clitest.Pod) { p.Volumes = append(p.Volumes, clitest.Volume{Name: "x"}) },
			"volume x is mounted nowhere",
		},
		{
			"a volume that is not there", func(p *clitest.Pod) { p.Volumes = p.Volumes[1:] },
			"mounts a volume trench that is not there",
		},
		{"a subPath", func(p *clitest.Pod) { p.Containers[1].VolumeMounts[0].SubPath = "trench.yaml" }, "is a subPath"},
		{"root", func(p *clitest.Pod) { p.Containers[0].SecurityContext.RunAsUser = 0 }, "runs as root"},
		{
			"a writable root", func(p *clitest.Pod) { p.Containers[0].SecurityContext.ReadOnlyRootFilesystem = false },
			"root file system",
		},
		{
			"capabilities kept", func(p *clitest.Pod) { p.Containers[0].SecurityContext.Capabilities.Drop = nil },
			"does not drop all",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := deployment(t).Spec.Template.Spec
			tt.spoil(&p)
			clitest.WantProblem(t, p.Problems(), tt.want)
		})
	}
}

// Both containers use the same socket in a volume of their common group, and authorize each
// other's identity.
func TestLBAndFrontendMeet(t *testing.T) {
	p := deployment(t).Spec.Template.Spec
	lb, frontend := p.Container(t, "lb"), p.Container(t, "frontend")
	for _, pair := range [][2]string{
		{"VIPGATE_SOCKET", "VIPGATE_LB_SOCKET"},
		{"VIPGATE_SPIFFE_ID", "VIPGATE_LB_ID"},
		{"VIPGATE_FRONTEND_ID", "VIPGATE_SPIFFE_ID"},
		{"VIPGATE_TRENCH_FILE", "VIPGATE_TRENCH_FILE"},
	} {
		a, b := lb.Variable(pair[0]), frontend.Variable(pair[1])
		if a == "" || a != b {
			t.Errorf("lb has %s=%q, the frontend %s=%q", pair[0], a, pair[1], b)
		}
	}
	if lb.Variable("VIPGATE_SPIFFE_ID") == frontend.Variable("VIPGATE_SPIFFE_ID") {
		t.Error("lb and frontend have the same identity")
	}
	if lb.Variable("VIPGATE_SOCKET_MODE") != "0660" || p.SecurityContext.FSGroup == 0 {
		t.Error("the frontend may not use the socket: it is another user, and there is no common group")
	}
	socket := strings.TrimPrefix(lb.Variable("VIPGATE_SOCKET"), "unix://")
	volume := func(c *clitest.Container) string {
		for _, m := range c.VolumeMounts {
			if m.MountPath == path.Dir(socket) {
				return m.Name
			}
		}
		return "none of " + c.Name
	}
	if volume(lb) != volume(frontend) {
		t.Errorf("lb has the socket in volume %s, the frontend in %s", volume(lb), volume(frontend))
	}
}

func TestThePodHasTimeToDrain(t *testing.T) {
	p := deployment(t).Spec.Template.Spec
	var longest time.Duration
	for _, c := range p.Containers {
		// lb has no settle time, and the same flag for the drain time.
		c.Args, c.Env = []string{"run"}, slices.DeleteFunc(c.Env,
			func(e clitest.Env) bool { return e.Name != "VIPGATE_DRAIN_TIME" })
		c.Environment(t)
		var line commandLine
		k := parserOf(t, &line)
		if _, err := k.Parse(c.Args); err != nil {
			t.Fatal(err)
		}
		longest = max(longest, line.Run.DrainTime+line.Run.Settle)
	}
	if grace := time.Duration(p.GracePeriodSeconds) * time.Second; grace < longest+10*time.Second {
		t.Errorf("the grace period is %v, drain and settle time %v: want 10 s more", grace, longest)
	}
}

// A hung process cannot drain, so the kubelet must kill it soon after its liveness probe failed.
func TestHungContainerRestartsInTime(t *testing.T) {
	pod := deployment(t).Spec.Template.Spec
	for _, c := range pod.Running() {
		p := c.LivenessProbe
		seconds := p.FailureThreshold*p.PeriodSeconds + p.GracePeriodSeconds
		if p.GracePeriodSeconds == 0 || seconds+p.TimeoutSeconds > 40 {
			t.Errorf("%s: a hung process ends %d s after its last good probe, with a grace period of %d s, want about 35 s",
				c.Name, seconds, p.GracePeriodSeconds)
		}
		if p.FailureThreshold*p.PeriodSeconds < 30 {
			t.Errorf("%s: the liveness probe gives a slow node only %d s", c.Name, p.FailureThreshold*p.PeriodSeconds)
		}
	}
}

// network is one entry of the Multus annotation.
type network struct{ Name, Interface string }

// networks returns the network toward the gateways and the network toward the targets.
func networks(t *testing.T) []network {
	var list []network
	annotation := deployment(t).Spec.Template.Metadata.Annotations["k8s.v1.cni.cncf.io/networks"]
	if err := json.Unmarshal([]byte(annotation), &list); err != nil || len(list) != 2 {
		t.Fatalf("the annotation is %q: %v", annotation, err)
	}
	return list
}

func TestExternalInterfaceIsAttached(t *testing.T) {
	n := networks(t)[0]
	if want := deployed(t).Container(t).Variable("VIPGATE_EXTERNAL_INTERFACE"); n.Interface != want {
		t.Errorf("the pod gets the interface %q, the frontend uses %q", n.Interface, want)
	}
}

// trenchObject holds the fields of a Trench that the tests read.
type trenchObject struct {
	Metadata struct{ Name string }
	Spec     struct {
		Network struct {
			Name    string
			Subnets []netip.Prefix
		}
		Attractor map[string]any
	}
}

func readTrench(t *testing.T, file string) trenchObject {
	return clitest.Read[trenchObject](t, file)
}

// trenchFile returns the trench file of the component without kube.
func trenchFile(t *testing.T) []byte {
	t.Helper()
	name := path.Base(deployed(t).Container(t).Variable("VIPGATE_TRENCH_FILE"))
	m := clitest.Read[struct {
		Metadata struct{ Name string }
		Data     map[string]string
	}](t, components+"without-kube/trench-file.yaml")
	volumes := clitest.Read[clitest.Deployment](t, components+"without-kube/deployment.yaml").Spec.Template.Spec.Volumes
	if !slices.ContainsFunc(volumes,
		func(v clitest.Volume) bool { return v.ConfigMap != nil && v.ConfigMap.Name == m.Metadata.Name }) {
		t.Errorf("no volume holds the ConfigMap %s", m.Metadata.Name)
	}
	if m.Data[name] == "" || len(m.Data) != 1 {
		t.Fatalf("the ConfigMap has not the file %s alone", name)
	}
	return []byte(m.Data[name])
}

// trenches returns the trench files of the manifests: the file of the ConfigMap, and the
// translations of Trenches without Services.
func trenches(t *testing.T) map[string]*trench.Config {
	t.Helper()
	texts := map[string][]byte{"without kube": trenchFile(t)}
	for _, name := range []string{base + "trench.yaml", example + "trench.yaml"} {
		object := readTrench(t, name)
		text, err := yaml.Dump(map[string]any{"trench": object.Metadata.Name, "attractor": object.Spec.Attractor})
		harness.Must(t, err)
		texts[name] = text
	}
	configs := map[string]*trench.Config{}
	for name, text := range texts {
		c, err := trenchfile.Parse(name, text, trench.DefaultDefaults())
		harness.Must(t, err)
		configs[name] = c
	}
	return configs
}

// attached is a network that the example attaches.
type attached struct {
	ranges []addressRange
	// sysctls are set by the tuning plugin, where IFNAME is the interface.
	sysctls map[string]string
}

// addressRange is the range of pod addresses.
type addressRange struct {
	Range   netip.Prefix
	Exclude []netip.Prefix
}

// readNetwork reads a NetworkAttachmentDefinition, which must have this name.
func readNetwork(t *testing.T, file, name string) attached {
	t.Helper()
	definition := clitest.Read[struct {
		Metadata struct{ Name string }
		Spec     struct{ Config string }
	}](t, file)
	if definition.Metadata.Name != name {
		t.Errorf("the network is called %s, the pod attaches %s", definition.Metadata.Name, name)
	}
	var config struct {
		Name    string
		Plugins []struct {
			Type string
			IPAM struct {
				Ranges []addressRange `json:"ipRanges"`
			}
			Sysctl map[string]string
		}
	}
	harness.Must(t, json.Unmarshal([]byte(definition.Spec.Config), &config))
	if len(config.Plugins) != 2 || config.Plugins[1].Type != "tuning" {
		t.Fatalf("%s: plugins %+v", file, config.Plugins)
	}
	a := attached{config.Plugins[0].IPAM.Ranges, config.Plugins[1].Sysctl}
	if config.Name != name || len(a.ranges) != 2 {
		t.Errorf("%s: network %q with %d ranges of addresses", file, config.Name, len(a.ranges))
	}
	return a
}

// fits returns an error if an address is outside of the network, or may be assigned to another
// pod.
func (a attached) fits(address netip.Addr) error {
	contains := func(p netip.Prefix) bool { return p.Contains(address) }
	for _, r := range a.ranges {
		if contains(r.Range) {
			if !slices.ContainsFunc(r.Exclude, contains) {
				return fmt.Errorf("a pod may get the address %s", address)
			}
			return nil
		}
	}
	return fmt.Errorf("%s is in no network of the pod", address)
}

// The gateways and the targets of the trench are in the networks that the example attaches, and
// their addresses are not assigned to pods.
func TestTheTrenchFilesFitTheNetworks(t *testing.T) {
	names := networks(t)
	gateways, targets := readNetwork(t, example+"network.yaml", names[0].Name), readNetwork(t,
		example+"targets-network.yaml", names[1].Name)
	for file, c := range trenches(t) {
		if len(c.Attractor.Gateways) == 0 || len(c.Streams) == 0 && !strings.HasSuffix(file, ".yaml") {
			t.Errorf("%s shows nothing", file)
		}
		for _, g := range c.Attractor.Gateways {
			if err := gateways.fits(g.Address); err != nil {
				t.Errorf("%s: gateway %s: %v", file, g.Name, err)
			}
		}
		for _, s := range c.Streams {
			for _, x := range s.Targets {
				for _, ip := range x.IPs {
					if err := targets.fits(ip); err != nil {
						t.Errorf("%s: target %s: %v", file, x.Name, err)
					}
				}
			}
		}
	}
}

// A program that forwards needs NET_ADMIN, and keeps its state on a volume that lasts as long as
// the kernel state.
func TestTheLBMayForward(t *testing.T) {
	p := deployment(t).Spec.Template.Spec
	lb := p.Container(t, "lb")
	if got := lb.Variable("VIPGATE_DATAPLANE"); got != "nftables" {
		t.Errorf("the data plane is %q", got)
	}
	if got := lb.SecurityContext.Capabilities.Add; !slices.Equal(got, []string{"NET_ADMIN", "NET_RAW"}) {
		t.Errorf("the lb has the capabilities %v", got)
	}
	dir := lb.Variable("VIPGATE_STATE_DIR")
	i := slices.IndexFunc(lb.VolumeMounts, func(m clitest.Mount) bool { return strings.HasPrefix(dir, m.MountPath+"/") })
	if i < 0 {
		t.Fatalf("the records in %q lie in no volume", dir)
	}
	for _, v := range p.Volumes {
		if v.Name == lb.VolumeMounts[i].Name && (v.EmptyDir == nil || v.EmptyDir.Medium != "Memory") {
			t.Errorf("the records are in volume %s, which does not end with the network namespace of the pod", v.Name)
		}
	}
}

// A kustomization names every file of its directory, and each name has a file.
func TestKustomizationsAreComplete(t *testing.T) {
	// The others belong to the cluster, to the owners of another namespace and of Alertmanager, and to
	// the application.
	apart := []string{
		"kustomization.yaml", "identities.yaml", "namespace-role.yaml", "alertmanager.yaml", "service.yaml",
		"application.yaml",
	}
	files, err := filepath.Glob(components + "*/kustomization.yaml")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	for _, file := range append(files, base+"kustomization.yaml", example+"kustomization.yaml") {
		dir := path.Dir(file)
		k := clitest.Read[struct {
			Resources  []string
			Patches    []struct{ Path string }
			Generators []struct{ Files []string } `yaml:"configMapGenerator"`
		}](t, file)
		named := slices.Clone(k.Resources)
		for _, p := range k.Patches {
			if p.Path != "" {
				named = append(named, p.Path)
			}
		}
		for _, g := range k.Generators {
			named = append(named, g.Files...)
		}
		for _, name := range named {
			if _, err := os.Stat(path.Join(dir, name)); err != nil {
				t.Error(err)
			}
		}
		files, err := os.ReadDir(dir)
		harness.Must(t, err)
		for _, f := range files {
			if !slices.Contains(named, f.Name()) && !slices.Contains(apart, f.Name()) {
				t.Errorf("%s/%s is in no kustomization", dir, f.Name())
			}
		}
	}
}

// The overlay authorizes the identities that SPIRE issues by the name of the container.
func TestTheExamplesIdentitiesAgree(t *testing.T) {
	b, err := os.ReadFile(example + "identities.yaml")
	harness.Must(t, err)
	patch := clitest.Read[clitest.Deployment](t, example+"spiffe-ids.yaml").Spec.Template.Spec
	original := deployment(t).Spec.Template.Spec
	given := map[string]string{}
	for _, object := range strings.Split(string(b), "\n---\n") {
		_, id, _ := strings.Cut(object, `spiffeIDTemplate: "spiffe://{{ .TrustDomain }}`)
		id, _, _ = strings.Cut(id, `"`)
		_, container, _ := strings.Cut(object, "k8s:container-name:")
		given[strings.TrimSpace(container)] = id
	}
	for _, c := range patch.Containers {
		known := original.Container(t, c.Name)
		for _, e := range c.Env {
			if known.Variable(e.Name) == "" {
				t.Errorf("the overlay sets %s of %s, which the base does not", e.Name, c.Name)
			}
		}
		own := c.Variable("VIPGATE_SPIFFE_ID")
		if want := "spiffe://example.com" + given[c.Name]; own != want {
			t.Errorf("%s is %s, SPIRE gives it %s", c.Name, own, want)
		}
	}
	lb, frontend := patch.Container(t, "lb"), patch.Container(t, "frontend")
	if lb.Variable("VIPGATE_FRONTEND_ID") != frontend.Variable("VIPGATE_SPIFFE_ID") ||
		frontend.Variable("VIPGATE_LB_ID") != lb.Variable("VIPGATE_SPIFFE_ID") {
		t.Error("lb and frontend of the overlay do not expect each other")
	}
}

func TestMeridio2ContainerFitsProgram(t *testing.T) {
	p := deployed(t)
	p.Manifest = "meridio2/swap.yaml"
	c := p.Container(t)
	const readinessDir = "/var/run/meridio"
	p.Documented = func(path string) bool {
		return slices.Contains([]string{readinessDir, "/tmp", "/var/run/secrets/kubernetes.io/serviceaccount"}, path)
	}
	for _, problem := range c.Problems(t, p.CommandLine) {
		// The directory of readiness files replaces the socket.
		if !strings.Contains(problem, "--lb-socket") {
			t.Error(problem)
		}
	}
	if dir := c.Variable("VIPGATE_READINESS_DIR"); dir != readinessDir {
		t.Errorf("readiness files are looked for in %q", dir)
	}
}
