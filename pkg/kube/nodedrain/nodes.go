package nodedrain

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// nodes caches the Nodes with the drain label. Other Nodes are never read.
type nodes struct {
	*cluster.Mirror
	changed chan struct{} // has a token after a change

	mu  sync.Mutex
	err error // of the last list or watch; nil after success
}

// follow keeps the Nodes current until end is called or ctx ends.
func follow(ctx context.Context, client dynamic.Interface, changed chan struct{}) *nodes {
	nodes := &nodes{Mirror: cluster.NewMirror(changed), changed: changed}
	nodes.Start(ctx, "nodes to drain", client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")),
		metav1.ListOptions{LabelSelector: v1alpha1.DrainLabel + "=true"},
		func(_ bool, err error) { nodes.failed(err) })
	return nodes
}

// end stops following, if nodes is not nil.
func (nodes *nodes) end() {
	if nodes != nil {
		nodes.End()
	}
}

// failed records the result of a list or a watch: of consecutive errors, the first.
func (nodes *nodes) failed(err error) {
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	if err == nil || nodes.err == nil {
		nodes.err = err
		latest.Wake(nodes.changed)
	}
}

// state reports whether the Nodes were listed at least once, and returns why they cannot be read
// now.
func (nodes *nodes) state() (listed bool, err error) {
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	return nodes.Synced(), nodes.err
}

// leaves reports whether a node has the drain label.
func (nodes *nodes) leaves(name string) bool {
	_, labelled, _ := nodes.GetByKey(name)
	return labelled
}
