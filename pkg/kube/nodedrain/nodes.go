package nodedrain

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// nodes caches the Nodes with the drain label. Other Nodes are never read.
type nodes struct{ *cluster.Mirror }

// follow keeps the Nodes current until end is called or ctx ends.
func follow(ctx context.Context, client dynamic.Interface, changed chan struct{}) *nodes {
	nodes := &nodes{cluster.NewMirror(changed)}
	nodes.Start(ctx, "nodes to drain", client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")),
		metav1.ListOptions{LabelSelector: v1alpha1.DrainLabel + "=true"}, nil)
	return nodes
}

// end stops following, if nodes is not nil.
func (nodes *nodes) end() {
	if nodes != nil {
		nodes.End()
	}
}

// leaves reports whether a node has the drain label.
func (nodes *nodes) leaves(name string) bool {
	_, labelled, _ := nodes.GetByKey(name)
	return labelled
}
