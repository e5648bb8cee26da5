package clitest

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
)

// Deployment holds the fields of a Deployment that the tests check.
type Deployment struct {
	Spec struct {
		Replicas int
		Selector LabelSelector
		Template struct {
			Metadata struct {
				Labels, Annotations map[string]string
			}
			Spec Pod
		}
	}
}

// LabelSelector is a LabelSelector without expressions.
type LabelSelector struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

// Pod is a PodSpec.
type Pod struct {
	ServiceAccountName string `yaml:"serviceAccountName"`
	EnableServiceLinks *bool  `yaml:"enableServiceLinks"`
	GracePeriodSeconds int    `yaml:"terminationGracePeriodSeconds"`
	SecurityContext    struct {
		RunAsNonRoot bool  `yaml:"runAsNonRoot"`
		FSGroup      int64 `yaml:"fsGroup"`
	} `yaml:"securityContext"`
	Affinity struct {
		PodAntiAffinity struct {
			Preferred []struct {
				PodAffinityTerm struct {
					LabelSelector LabelSelector `yaml:"labelSelector"`
				} `yaml:"podAffinityTerm"`
			} `yaml:"preferredDuringSchedulingIgnoredDuringExecution"`
		} `yaml:"podAntiAffinity"`
	}
	Spread []struct {
		LabelSelector LabelSelector `yaml:"labelSelector"`
	} `yaml:"topologySpreadConstraints"`
	InitContainers []Container `yaml:"initContainers"`
	Containers     []Container
	Volumes        []Volume
}

// Running returns the containers that run as long as the pod: native sidecars, which start first
// and end last, and the main containers.
func (p *Pod) Running() []Container {
	var running []Container
	for _, c := range p.InitContainers {
		if c.RestartPolicy == "Always" {
			running = append(running, c)
		}
	}
	return append(running, p.Containers...)
}

// Container is a Container.
type Container struct {
	Name, Image     string
	RestartPolicy   string `yaml:"restartPolicy"`
	Command, Args   []string
	Env             []Env
	Ports           []Port
	StartupProbe    *Probe          `yaml:"startupProbe"`
	ReadinessProbe  *Probe          `yaml:"readinessProbe"`
	LivenessProbe   *Probe          `yaml:"livenessProbe"`
	SecurityContext SecurityContext `yaml:"securityContext"`
	VolumeMounts    []Mount         `yaml:"volumeMounts"`
}

// SecurityContext is the security context of a container.
type SecurityContext struct {
	Privileged               bool
	RunAsUser                int64 `yaml:"runAsUser"`
	RunAsGroup               int64 `yaml:"runAsGroup"`
	ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
	AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
	Capabilities             struct{ Add, Drop []string }
}

// Env is an environment variable.
type Env struct {
	Name, Value string
	ValueFrom   struct {
		FieldRef struct {
			FieldPath string `yaml:"fieldPath"`
		} `yaml:"fieldRef"`
	} `yaml:"valueFrom"`
}

// Port is a port of a container.
type Port struct {
	Name          string
	ContainerPort int `yaml:"containerPort"`
}

// Probe is a probe. Only gRPC probes are supported.
type Probe struct {
	GRPC *struct {
		Port    int
		Service string
	} `yaml:"grpc"`
	PeriodSeconds      int `yaml:"periodSeconds"`
	TimeoutSeconds     int `yaml:"timeoutSeconds"`
	FailureThreshold   int `yaml:"failureThreshold"`
	GracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
}

// Mount is a volume mount.
type Mount struct {
	Name      string
	MountPath string `yaml:"mountPath"`
	SubPath   string `yaml:"subPath"`
	ReadOnly  bool   `yaml:"readOnly"`
}

// Volume is a volume.
type Volume struct {
	Name     string
	EmptyDir *struct {
		Medium string
	} `yaml:"emptyDir"`
	ConfigMap *struct{ Name string } `yaml:"configMap"`
	Projected *struct{}              `yaml:"projected"`
	CSI       *struct {
		Driver   string
		ReadOnly bool `yaml:"readOnly"`
	} `yaml:"csi"`
}

// Read reads a YAML file with one object of Kubernetes, and fails the test when
// it cannot.
func Read[T any](tb testing.TB, path string) T {
	tb.Helper()
	data, err := os.ReadFile(path)
	harness.Must(tb, err)
	var object T
	if err := yaml.Load(data, &object); err != nil {
		tb.Fatalf("%s: %v", path, err)
	}
	return object
}

// Container returns a running container by its name.
func (p *Pod) Container(tb testing.TB, name string) *Container {
	tb.Helper()
	for _, list := range [][]Container{p.InitContainers, p.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	tb.Fatalf("the pod has no container %s", name)
	return nil
}

// Variable returns the value of an environment variable, or "".
func (c *Container) Variable(name string) string {
	for _, e := range c.Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

// Problems lists the inconsistencies of a pod.
func (p *Pod) Problems() []string {
	var problems []string
	problem := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if p.EnableServiceLinks == nil || *p.EnableServiceLinks {
		problem("enableServiceLinks is not false: a Service can set variables of our flags")
	}
	mounted := map[string]bool{}
	for _, c := range p.Running() {
		if len(c.Command) > 0 {
			problem("%s: the command replaces the image's entry point", c.Name)
		}
		if !c.SecurityContext.ReadOnlyRootFilesystem {
			problem("%s: the root file system is not read-only", c.Name)
		}
		if !p.SecurityContext.RunAsNonRoot || c.SecurityContext.RunAsUser == 0 {
			problem("%s: runs as root", c.Name)
		}
		if c.SecurityContext.Privileged {
			problem("%s: is privileged", c.Name)
		}
		if !slices.Equal(c.SecurityContext.Capabilities.Drop, []string{"ALL"}) {
			problem("%s: does not drop all capabilities", c.Name)
		}
		for _, m := range c.VolumeMounts {
			mounted[m.Name] = true
			if m.SubPath != "" {
				problem("%s: %s is a subPath, which is never updated", c.Name, m.MountPath)
			}
			if !slices.ContainsFunc(p.Volumes, func(v Volume) bool { return v.Name == m.Name }) {
				problem("%s: %s mounts a volume %s that is not there", c.Name, m.MountPath, m.Name)
			}
		}
	}
	for _, v := range p.Volumes {
		if !mounted[v.Name] {
			problem("volume %s is mounted nowhere", v.Name)
		}
	}
	return problems
}

// Image holds the instructions of a Dockerfile that the tests check.
type Image struct {
	EntryPoint string
	User       string
	// Capabilities are the file capabilities of each executable, as a manifest
	// writes them, sorted.
	Capabilities map[string][]string
	// Raised reports whether the program raises them (`+p`): exec then succeeds without them.
	Raised bool
}

var (
	entryPoint = regexp.MustCompile(`(?m)^ENTRYPOINT \["([^"]+)"\]$`)
	user       = regexp.MustCompile(`(?m)^USER (\S+)$`)
	setcap     = regexp.MustCompile(`setcap (\S+)\+(e?p) (\S+)`)
)

// ReadImage reads a Dockerfile.
func ReadImage(tb testing.TB, path string) Image {
	tb.Helper()
	data, err := os.ReadFile(path)
	harness.Must(tb, err)
	image := Image{Capabilities: map[string][]string{}}
	for _, m := range entryPoint.FindAllSubmatch(data, -1) {
		image.EntryPoint = string(m[1])
	}
	for _, m := range user.FindAllSubmatch(data, -1) {
		image.User = string(m[1])
	}
	for _, m := range setcap.FindAllSubmatch(data, -1) {
		capabilities := strings.Split(strings.ToUpper(strings.ReplaceAll(string(m[1]), "cap_", "")), ",")
		slices.Sort(capabilities)
		image.Capabilities[string(m[3])] = capabilities
		image.Raised = image.Raised || string(m[2]) == "p"
	}
	return image
}

// ImageProblems lists the mismatches between a container and its image: user and file
// capabilities.
func (c *Container) ImageProblems(image Image) []string {
	var problems []string
	s := c.SecurityContext
	if want := fmt.Sprintf("%d:%d", s.RunAsUser, s.RunAsGroup); image.User != want {
		problems = append(problems,
			fmt.Sprintf("%s: the image's user is %s, the container's %s", c.Name, image.User, want))
	}
	escalation := s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation
	allowed := slices.Sorted(slices.Values(s.Capabilities.Add))
	if image.Raised && !escalation && len(allowed) == 0 {
		return problems
	}
	if needed := len(image.Capabilities) > 0; needed != escalation {
		problems = append(problems, fmt.Sprintf("%s: allowPrivilegeEscalation is %t, and the image has file "+
			"capabilities: %t", c.Name, escalation, needed))
	}
	if c.Name == "frontend" {
		// No executable has SYS_PTRACE as a file capability: the manifest adds it because it allows
		// pidfd_getfd(2) in the seccomp profile RuntimeDefault.
		allowed = slices.DeleteFunc(allowed, func(capability string) bool { return capability == "SYS_PTRACE" })
	}
	if len(image.Capabilities) == 0 && len(allowed) > 0 {
		problems = append(problems,
			fmt.Sprintf("%s: capabilities %v cannot come into effect: no file of the image has them",
				c.Name, allowed))
	}
	for file, has := range image.Capabilities {
		if !slices.Equal(has, allowed) {
			problems = append(problems,
				fmt.Sprintf("%s: %s has the file capabilities %v, the container allows %v", c.Name,
					file, has, allowed))
		}
	}
	return problems
}
