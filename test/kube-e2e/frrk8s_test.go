package kubee2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/bgpsessions"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/speaker/frrk8s"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	frrK8sData      = "test/e2e/testdata/frr-k8s/"
	frrK8sNamespace = "frr-k8s-system"
)

// installFRRK8s applies the definitions of frr-k8s, and the node of the first trench pod.
func (f *fixture) installFRRK8s() {
	f.t.Helper()
	for _, name := range []string{"bgpsessionstates", "frrconfigurations", "frrk8sconfigurations", "frrnodestates"} {
		f.cluster.Apply(f.t, f.manifest(frrK8sData+name+".yaml"))
	}
	f.cluster.Apply(f.t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+frrK8sNamespace+"}}")
	f.cluster.Apply(f.t, `
apiVersion: v1
kind: Node
metadata: {name: node-1, labels: {kubernetes.io/hostname: node-1}}
`)
}

// TestFRRK8sSessions has kube write the BGPSessionStates of its node for the frontend: not before it
// is allowed to read them, the node's and the default VRF's only, and after each change.
func TestFRRK8sSessions(t *testing.T) {
	f := newCluster(t)
	var err error
	f.Topology, err = lab.NewTopology(lab.TopologyConfig{
		Pods: 1, Targets: 1, Binaries: binaries, VIPs: []netip.Addr{netip.MustParseAddr(vip4), netip.MustParseAddr(vip6)},
	})
	f.must(err)
	t.Cleanup(func() { f.must(f.Close()) })
	f.cluster.Apply(t, trenchManifest())
	f.createTrenchPod(1)
	p := f.Pods[0]
	f.must(os.MkdirAll(filepath.Dir(p.TrenchFile()), 0o755))
	f.kubes = append(f.kubes, f.startKube(1, p.TrenchFile(), "--frr-k8s-namespace="+frrK8sNamespace))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(f.kubes[0].Tail(30))
		}
	})
	view := frrk8s.NewView(p.TrenchFile() + frrk8s.Suffix)
	f.wantKubeStatus(1, "BGPSessionStates in the namespace frr-k8s-system cannot be read") // no definition, no Role
	if _, _, err := view.Sessions(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("sessions without a right to read them: %v", err)
	}

	f.installFRRK8s()
	f.cluster.ApplyIn(t, frrK8sNamespace, frrK8sRole)
	f.wantSessions(view)
	f.session("a", "node-1", "192.0.2.1", "", "Established")
	f.session("b", "node-1", "2001-0db8-0000-0000-0000-0000-0000-0001", "", "Active")
	f.session("c", "node-1", "192.0.2.1", "red", "Established")
	f.session("d", "node-2", "192.0.2.9", "", "Established")
	f.wantSessions(view, "192.0.2.1 Established", "2001:db8::1 Active")
	f.session("a", "node-1", "192.0.2.1", "", "Connect")
	f.wantSessions(view, "192.0.2.1 Connect", "2001:db8::1 Active")

	objects, err := dynamic.NewForConfig(f.cluster.Admin())
	f.must(err)
	f.must(objects.Resource(bgpsessions.Resource).Namespace(frrK8sNamespace).Delete(t.Context(), "b",
		metav1.DeleteOptions{}))
	f.wantSessions(view, "192.0.2.1 Connect")

	// A kube that hangs leaves a file that says nothing after a while.
	f.must(f.kubes[0].Signal(unix.SIGSTOP))
	f.wait(func(ctx context.Context) error {
		_, _, err := view.Sessions(ctx)
		if err == nil || !strings.Contains(err.Error(), "old; see the status of kube") {
			return fmt.Errorf("the sessions of a hung kube: %w", err)
		}
		return nil
	})
	f.must(f.kubes[0].Signal(unix.SIGCONT))
	f.wantSessions(view, "192.0.2.1 Connect")
}

// frrK8sRole is what the chart creates with speaker: frr-k8s.
const frrK8sRole = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: vipgate-sessions}
rules: [{apiGroups: [frrk8s.metallb.io], resources: [bgpsessionstates], verbs: [list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: vipgate-sessions}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: vipgate-sessions}
subjects: [{kind: ServiceAccount, name: vipgate, namespace: trench-a}]
`

// session applies a BGPSessionState as frr-k8s does.
func (f *fixture) session(name, node, peer, vrf, state string) {
	f.t.Helper()
	f.cluster.ApplyIn(f.t, frrK8sNamespace, fmt.Sprintf(`
apiVersion: frrk8s.metallb.io/v1beta1
kind: BGPSessionState
metadata:
  name: %s
  labels: {frrk8s.metallb.io/node: %[2]s, frrk8s.metallb.io/peer: %[3]q, frrk8s.metallb.io/vrf: %[4]q}
status: {node: %[2]s, peer: %[3]q, vrf: %[4]q, bgpStatus: %[5]s, bfdStatus: N/A}
`, name, node, peer, vrf, state))
}

// wantSessions waits until the view has exactly these peers and states.
func (f *fixture) wantSessions(view speaker.View, want ...string) {
	f.t.Helper()
	begin := time.Now()
	f.wait(func(ctx context.Context) error {
		_, sessions, err := view.Sessions(ctx)
		if err != nil {
			return err
		}
		var got []string
		for _, s := range sessions {
			got = append(got, fmt.Sprint(s.Peer, " ", s.State))
		}
		if got = slices.Compact(got); !slices.Equal(got, want) {
			return fmt.Errorf("sessions %q, want %q", got, want)
		}
		return nil
	})
	f.t.Logf("%q after %v", want, time.Since(begin).Round(time.Millisecond))
}
