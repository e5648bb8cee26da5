package lb

import (
	"fmt"
	"slices"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/registry"
)

// Every combination of the options that name peers: who passes the handshake, in which role on the
// readiness socket, and who may list all targets. No peer has a right that no option names for it.
func TestAuthorization(t *testing.T) {
	id := spiffeid.RequireFromString
	frontend, reader, target := id("spiffe://a.org/frontend"), id("spiffe://a.org/reader"), id("spiffe://a.org/ns/x/app")
	probe := id("spiffe://a.org/probe")
	peers := []spiffeid.ID{
		frontend, reader, target, id("spiffe://a.org/other"), id("spiffe://b.org/frontend"), id("spiffe://a.org"),
		id("spiffe://b.org/ns/x/app"), id("spiffe://a.org/frontend/x"), id("spiffe://a.org.b/other"),
		probe,
		{},
	}
	allowance, err := registry.ParseAllowance("stream=spiffe://a.org/ns/*/app")
	if err != nil {
		t.Fatal(err)
	}
	for bits := range 1 << 6 {
		has := func(bit int) bool { return bits&(1<<bit) != 0 }
		var o Options
		if has(0) {
			o.Frontends = []spiffeid.ID{frontend}
		}
		if has(1) {
			o.FrontendDomain = frontend.TrustDomain()
		}
		if has(2) {
			o.Readers = []spiffeid.ID{reader}
		}
		if has(3) {
			o.Targets.Registry.Allow = registry.Allowances{allowance}
		}
		o.Targets.Registry.Off = has(4)
		if has(5) {
			o.Probes = []spiffeid.ID{probe}
		}
		t.Run(fmt.Sprintf("%06b", bits), func(t *testing.T) {
			authorize, role := o.authorize(), o.roles()
			for _, peer := range peers {
				member := has(1) && peer.TrustDomain().Name() == "a.org"
				want := readiness.RoleNone
				switch {
				case has(5) && peer == probe: // no frontend, although a member of the domain
				case has(0) && peer == frontend:
					want = readiness.RoleFrontend
				case has(2) && peer == reader:
					want = readiness.RoleReader
				case member:
					want = readiness.RoleFrontend
				}
				if got := role(peer); got != want {
					t.Errorf("role of %q: %d, want %d", peer, got, want)
				}
				admitted := want != readiness.RoleNone || has(3) && !has(4) && peer == target || has(5) && peer == probe
				if err := authorize(peer, nil); (err == nil) != admitted {
					t.Errorf("handshake of %q: %v, want admitted %v", peer, err, admitted)
				}
				lists := has(0) && peer == frontend || has(2) && peer == reader
				if got := o.readsTargets(peer); got != lists {
					t.Errorf("%q lists all targets: %v, want %v", peer, got, lists)
				}
			}
			if slices.Contains(o.Frontends, reader) {
				t.Error("the options were changed")
			}
		})
	}
}

// The operator's service is for the admin socket alone.
func TestTargetServiceOfPeers(t *testing.T) {
	p := &process{sources: &sources{}}
	if p.targetService(false).Operator || !p.targetService(true).Operator {
		t.Error("the readiness socket has the operator's rights, or the admin socket has not")
	}
}
