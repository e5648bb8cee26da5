package clitest

import (
	"fmt"
	"net/netip"
	"os"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/test/harness"
)

// CommandLine is a program as a container runs it.
type CommandLine struct {
	Parser *kong.Kong
	// Services are the health services that the program serves.
	Services []string
	// Variables lists the variables that the program reads in addition to the ones of flags.
	Variables []string
	// Reads names the flags whose paths are only read, so that they may lie in a
	// read-only mount.
	Reads []string
	// EveryAddress reports whether health may be served at every address of the pod.
	EveryAddress bool
	// Documented reports whether a mount that no flag uses is explained somewhere. If it is nil, the
	// README of the manifests must name the path.
	Documented func(path string) bool
}

// podIP is the pod's address, as the downward API would set it.
const podIP = "192.0.2.1"

var reference = regexp.MustCompile(`\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)

// Environment replaces vipgate's variables in the environment of the process by the container's
// for the duration of the test, and returns the container's variables.
func (c *Container) Environment(tb testing.TB) map[string]string {
	tb.Helper()
	for _, e := range os.Environ() {
		if name, value, _ := strings.Cut(e, "="); strings.HasPrefix(name, "VIPGATE_") ||
			strings.HasPrefix(name, "NFE_") {
			harness.Must(tb, os.Unsetenv(name))
			tb.Cleanup(func() { _ = os.Setenv(name, value) })
		}
	}
	given := c.Values(map[string]string{"status.podIP": podIP, "metadata.uid": "uid"})
	for name, value := range given {
		old, had := os.LookupEnv(name)
		harness.Must(tb, os.Setenv(name, value))
		tb.Cleanup(func() {
			if had {
				_ = os.Setenv(name, old)
			} else {
				_ = os.Unsetenv(name)
			}
		})
	}
	return given
}

// Values returns the container's variables as the kubelet sets them: fields of the pod from the
// downward API are filled in, and references to earlier variables are replaced. Unresolved
// references are kept.
func (c *Container) Values(fields map[string]string) map[string]string {
	given := map[string]string{}
	for _, e := range c.Env {
		if field := e.ValueFrom.FieldRef.FieldPath; field != "" {
			given[e.Name] = fields[field]
			continue
		}
		given[e.Name] = reference.ReplaceAllStringFunc(e.Value, func(r string) string {
			if value, ok := given[r[2:len(r)-1]]; ok {
				return value
			}
			return r
		})
	}
	return given
}

// Problems lists the mismatches between container and program: arguments and variables that do
// not exist or whose values are rejected, probes without a request, ports without a listener,
// paths outside of every mount, and unused mounts.
func (c *Container) Problems(tb testing.TB, l CommandLine) []string {
	tb.Helper()
	given := c.Environment(tb)
	parsed, err := l.Parser.Parse(c.Args)
	if err != nil {
		return []string{fmt.Sprintf("%s: the program refuses its arguments and variables: %v", c.Name, err)}
	}
	flags := map[string]*kong.Flag{}
	variables := slices.Clone(l.Variables)
	for _, f := range parsed.Flags() {
		flags[f.Name] = f
		variables = append(variables, f.Envs...)
	}
	if l.Documented == nil {
		l.Documented = inReadme(tb)
	}
	p := problems{container: c}
	for _, e := range c.Env {
		used := slices.Contains(variables, e.Name)
		for _, other := range c.Env {
			used = used || strings.Contains(other.Value, "$("+e.Name+")")
		}
		if !used {
			p.add("nothing reads the variable %s", e.Name)
		}
		if reference.MatchString(given[e.Name]) {
			p.add("%s=%s refers to a variable that is not set before it", e.Name, e.Value)
		}
	}
	p.probes(flags, l)
	p.mounts(flags, given, l)
	return p.list
}

type problems struct {
	container *Container
	list      []string
}

func (p *problems) add(format string, args ...any) {
	p.list = append(p.list, p.container.Name+": "+fmt.Sprintf(format, args...))
}

// probes compares probes and ports with the listeners of the program.
func (p *problems) probes(flags map[string]*kong.Flag, l CommandLine) {
	c := p.container
	health, metrics := listener(flags["health-address"]), listener(flags["metrics-address"])
	for _, of := range []struct {
		name  string
		probe *Probe
	}{{"startup", c.StartupProbe}, {"readiness", c.ReadinessProbe}, {"liveness", c.LivenessProbe}} {
		switch {
		case of.probe == nil || of.probe.GRPC == nil:
			p.add("has no %s probe by gRPC", of.name)
			continue
		case of.probe.GRPC.Port != int(health.Port()):
			p.add("the %s probe asks port %d, health is at %d", of.name, of.probe.GRPC.Port, health.Port())
		}
		if !slices.Contains(l.Services, of.probe.GRPC.Service) {
			p.add("the %s probe asks for %q, which is not served: %q", of.name, of.probe.GRPC.Service, l.Services)
		}
	}
	for flag, at := range map[string]netip.AddrPort{"health": health, "metrics": metrics} {
		host := at.Addr().String()
		if every := l.EveryAddress && flag == "health" && host == "0.0.0.0"; host != podIP && !every {
			p.add("--%s-address is %s, not the pod's address", flag, host)
		}
	}
	var ports []int
	for _, port := range c.Ports {
		ports = append(ports, port.ContainerPort)
	}
	if want := []int{int(health.Port()), int(metrics.Port())}; !slices.Equal(ports, want) {
		p.add("the ports are %v, the program listens on %v", ports, want)
	}
}

// listener returns the address in the value of a flag, or the zero AddrPort.
func listener(flag *kong.Flag) netip.AddrPort {
	at, _ := netip.ParseAddrPort(text(flag))
	return at
}

// mounts compares mounts with the paths that the program uses.
func (p *problems) mounts(flags map[string]*kong.Flag, given map[string]string, l CommandLine) {
	c := p.container
	used := make([]bool, len(c.VolumeMounts))
	use := func(what, file string, writes bool) {
		i := slices.IndexFunc(c.VolumeMounts, func(m Mount) bool { return within(file, m.MountPath) })
		switch {
		case i < 0:
			p.add("%s is %s, which lies in no mount", what, file)
			return
		case writes && c.VolumeMounts[i].ReadOnly:
			p.add("%s is %s, which lies in a read-only mount", what, file)
		}
		used[i] = true
	}
	for name, f := range flags {
		if file, ok := pathOf(text(f)); ok {
			use("--"+name, file, !slices.Contains(l.Reads, name))
		}
	}
	for _, name := range l.Variables {
		if file, ok := pathOf(given[name]); ok {
			use(name, file, false)
		}
	}
	for i, m := range c.VolumeMounts {
		if !used[i] && !l.Documented(m.MountPath) {
			p.add("nothing uses the mount %s, and no document explains it", m.MountPath)
		}
	}
	slices.Sort(p.list)
}

// text returns the value of a flag after parsing.
func text(f *kong.Flag) string {
	if f == nil || !f.Target.IsValid() || f.Target.Kind() == reflect.Slice {
		return ""
	}
	return fmt.Sprint(f.Target.Interface())
}

func pathOf(value string) (string, bool) {
	file := strings.TrimPrefix(value, "unix://")
	return file, path.IsAbs(file)
}

func within(file, dir string) bool {
	return file == dir || strings.HasPrefix(file, strings.TrimSuffix(dir, "/")+"/")
}

// Environment sets the variables of an environment file in deployments/ for the test, and fails
// unless the program reads each of them.
func Environment(t *testing.T, parser *kong.Kong, file string) {
	t.Helper()
	text, err := os.ReadFile(Deployments + file)
	harness.Must(t, err)
	known := map[string]bool{}
	for _, command := range parser.Model.Leaves(true) {
		for _, flag := range command.Flags {
			for _, variable := range flag.Envs {
				known[variable] = true
			}
		}
	}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(line, "#") {
			if t.Setenv(name, value); !known[name] {
				t.Errorf("%s: nothing reads %s", file, name)
			}
		}
	}
}
