package pods

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubeconfigs with credentials of an identity provider
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// trenchLabel is the label of trench pods. Its value is the name of the Trench.
const trenchLabel = "vipgate.io/trench-pod"

// Cluster is the source of pods in Kubernetes.
type Cluster struct {
	Namespace string
	Trench    string // empty: the only one of the namespace
	config    *rest.Config
	core      *typedcorev1.CoreV1Client
}

// Access selects a cluster as kubectl does: empty fields are those of the kubeconfig, and an empty
// Kubeconfig is $KUBECONFIG or ~/.kube/config.
type Access struct{ Kubeconfig, Context, Namespace string }

// NewCluster returns the pods of a trench. It does not connect.
func NewCluster(access Access, trench string) (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = access.Kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: access.Context}
	overrides.Context.Namespace = access.Namespace
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("failed to find an API server: %w", err)
	}
	namespace, _, err := loader.Namespace()
	if err != nil {
		return nil, fmt.Errorf("failed to find the namespace: %w", err)
	}
	config.UserAgent = "kubectl-vipgate"
	config.QPS, config.Burst = -1, 0 // List and Run are bounded already
	core, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server: %w", err)
	}
	return &Cluster{Namespace: namespace, Trench: trench, config: config, core: core}, nil
}

// Members lists the pods with the label of the trench, except those that ended.
func (c *Cluster) Members(ctx context.Context) ([]Member, error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return nil, err
	}
	var members []Member
	for _, pod := range pods {
		member := Member{Name: pod.Name, Programs: map[string]string{}}
		if pod.DeletionTimestamp != nil {
			member.Problem = "the pod is terminating"
		}
		// A native sidecar is an init container.
		for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			if container.Name == Frontend || container.Name == LB || container.Name == Kube {
				member.Programs[container.Name] = notRunning(pod, container.Name)
			}
		}
		if _, exists := member.Programs[Frontend]; !exists {
			member.Programs[Frontend] = "the pod has no such container"
		}
		members = append(members, member)
	}
	return members, nil
}

// Pods lists the Pods of the trench that did not end, ordered by name.
func (c *Cluster) Pods(ctx context.Context) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	selector := trenchLabel
	if c.Trench != "" {
		selector += "=" + c.Trench
	}
	list, err := c.core.Pods(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("failed to list the pods of namespace %s: %w", c.Namespace, err)
	}
	// An evicted pod stays until the garbage collection, and another one replaces it.
	pods := slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool {
		return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	})
	trenches := map[string]bool{}
	for _, pod := range pods {
		trenches[pod.Labels[trenchLabel]] = true
	}
	switch names := slices.Sorted(maps.Keys(trenches)); len(names) {
	case 0:
		return nil, fmt.Errorf("namespace %s has no pod with the label %s; select another one by --namespace", c.Namespace,
			selector)
	case 1:
	default:
		return nil, fmt.Errorf("namespace %s has %d trenches; select one by --trench: %s", c.Namespace, len(names),
			strings.Join(names, ", "))
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods, nil
}

// notRunning returns why a container does not run, or "".
func notRunning(pod corev1.Pod, name string) string {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		switch {
		case s.Name != name || s.State.Running != nil:
		case s.State.Waiting != nil:
			return "the container waits: " + strings.TrimSuffix(s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
		case s.State.Terminated != nil:
			return fmt.Sprintf("the container ended with status %d: %s", s.State.Terminated.ExitCode, s.State.Terminated.Reason)
		}
	}
	if pod.Spec.NodeName == "" {
		return "the pod is not scheduled"
	}
	return "" // without a status only the kubelet can report it
}

// Run runs a command in a container by exec. Proxies that refuse WebSockets get SPDY.
func (c *Cluster) Run(ctx context.Context, pod, program string, command []string, stdout io.Writer) error {
	url := c.core.RESTClient().Post().Resource("pods").Namespace(c.Namespace).Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: program, Command: command, Stdin: true, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec).URL()
	spdy, err := remotecommand.NewSPDYExecutor(c.config, http.MethodPost, url)
	if err != nil {
		return fmt.Errorf("failed to prepare exec: %w", err)
	}
	websocket, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, url.String())
	if err != nil {
		return fmt.Errorf("failed to prepare exec: %w", err)
	}
	executor, err := remotecommand.NewFallbackExecutor(websocket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return fmt.Errorf("failed to prepare exec: %w", err)
	}
	// A command that follows ends at the end of its input, which is the end of the connection:
	// nothing else ends it in the container.
	input, end := io.Pipe()
	defer end.Close()
	var stderr bytes.Buffer
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: input, Stdout: stdout, Stderr: &stderr})
	var exit utilexec.CodeExitError
	if errors.As(err, &exit) {
		return &ExitError{Status: exit.Code, Stderr: stderr.String()}
	}
	if err != nil {
		return fmt.Errorf("exec in container %s failed: %w", program, err)
	}
	return nil
}
