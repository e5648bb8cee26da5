// Package bgpsessions writes the BGPSessionStates that frr-k8s keeps for the node of this pod into
// the file that the frontend reads with --gateway-state=frr-k8s; see package frrk8s of the speaker.
//
// The file is written after each change and every [frrk8s.WriteInterval], while the watch of the
// objects is current. Otherwise it ages, and its readers discard it.
package bgpsessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/speaker/frrk8s"
)

// Resource is the resource of the BGPSessionStates.
var Resource = schema.GroupVersionResource{Group: "frrk8s.metallb.io", Version: "v1beta1", Resource: "bgpsessionstates"}

// nodeLabel is the label of a BGPSessionState with the name of its node.
const nodeLabel = "frrk8s.metallb.io/node"

// fileMode gives the group read access, because the frontend may run as a different user.
const fileMode fs.FileMode = 0o640

// Options configure a Writer. All are required.
type Options struct {
	Client    dynamic.Interface
	Namespace string // of frr-k8s
	Pod       string // name of this process's pod
	Path      string // of the file
	// Input has the pods of the Trench, this process's pod among them.
	Input *latest.Value[publication.Input]
	// Current reports whether the API server answers; a watch does not notice a hung one.
	Current func() bool
	// Report is called with the reason why the sessions are unknown, or nil.
	Report func(error)
	Log    *slog.Logger
}

// Writer writes the file. It implements task.Task.
type Writer struct {
	Options
	changed chan struct{} // has a token after a change of the objects, or of their state
}

// New returns a Writer.
func New(options Options) *Writer { return &Writer{Options: options, changed: make(chan struct{}, 1)} }

// String implements task.Task.
func (*Writer) String() string { return "BGP sessions of frr-k8s" }

// Run writes until ctx ends. The file stays.
func (writer *Writer) Run(ctx context.Context) error {
	node, err := writer.node(ctx)
	if err != nil {
		return err
	}
	mirror := cluster.NewMirror(writer.changed)
	mirror.Start(ctx, "BGPSessionStates", writer.Client.Resource(Resource).Namespace(writer.Namespace),
		metav1.ListOptions{LabelSelector: nodeLabel + "=" + node}, nil)
	defer mirror.End()
	var reported string
	for {
		synced, err := mirror.State()
		if err != nil {
			err = fmt.Errorf("BGPSessionStates in the namespace %s cannot be read: %w", writer.Namespace, err)
		} else if synced && writer.Current() {
			err = writer.write(node, mirror.List())
		}
		if text := fmt.Sprint(err); text != reported {
			reported = text
			writer.Report(err)
			if err != nil {
				writer.Log.Warn("sessions of frr-k8s unknown", "error", err)
			}
		}
		select {
		case <-writer.changed:
		case <-time.After(frrk8s.WriteInterval):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// node waits for the pod of this process and returns its node.
func (writer *Writer) node(ctx context.Context) (string, error) {
	for {
		input, changed := writer.Input.Get()
		i := slices.IndexFunc(input.Siblings, func(pod *corev1.Pod) bool { return pod.Name == writer.Pod })
		if i >= 0 && input.Siblings[i].Spec.NodeName != "" {
			return input.Siblings[i].Spec.NodeName, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// write writes the sessions of the default VRF, which the FRRConfiguration is for.
func (writer *Writer) write(node string, objects []any) error {
	file := frrk8s.File{Written: time.Now().UTC(), Node: node}
	for _, object := range objects {
		status, _, _ := unstructured.NestedMap(object.(*unstructured.Unstructured).Object, "status")
		field := func(name string) string {
			text, _ := status[name].(string)
			return text
		}
		if field("vrf") == "" && field("peer") != "" {
			session := frrk8s.Session{Peer: field("peer"), State: field("bgpStatus"), BFD: field("bfdStatus")}
			file.Sessions = append(file.Sessions, session)
		}
	}
	slices.SortFunc(file.Sessions, func(a, b frrk8s.Session) int { return strings.Compare(a.Peer, b.Peer) })
	text, err := json.Marshal(file)
	if err != nil {
		return errors.Join(errors.New("failed to encode the sessions of frr-k8s"), err)
	}
	return durable.Replace(writer.Path, append(text, '\n'), fileMode)
}
