package lb

import (
	"crypto/x509"
	"fmt"
	"slices"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
)

// authorize admits all configured peers; each service authorizes the calls of a peer.
func (o Options) authorize() tlsconfig.Authorizer {
	exact := slices.Concat(o.Frontends, o.Readers, o.Probes)
	wide := identity.Authorize(exact...)
	if !o.FrontendDomain.IsZero() {
		wide = identity.AuthorizeMember(o.FrontendDomain, exact...)
	}
	// Without the registry, an ID of --target-id has no service to call.
	if o.Targets.Registry.Off {
		return wide
	}
	return func(id spiffeid.ID, chains [][]*x509.Certificate) error {
		if o.Targets.Registry.Allow.Authorizes(id) {
			return nil
		}
		if err := wide(id, chains); err != nil {
			// The error lists the IDs of both rules, since the peer may be meant for either.
			return fmt.Errorf("%w, or one that --target-id allows: %s", err, o.Targets.Registry.Allow)
		}
		return nil
	}
}

// roles returns the roles of peers on the readiness socket. An ID in Readers is a reader even if it
// is a member of FrontendDomain, and a probe has no role there.
func (o Options) roles() func(spiffeid.ID) readiness.Role {
	exact := readiness.RolesOf(o.Frontends, o.Readers)
	return func(id spiffeid.ID) readiness.Role {
		r := exact(id)
		if slices.Contains(o.Probes, id) {
			return r
		}
		if r == readiness.RoleNone && !o.FrontendDomain.IsZero() && id.MemberOf(o.FrontendDomain) {
			return readiness.RoleFrontend
		}
		return r
	}
}

// readsTargets reports whether a peer that must not register targets may list them.
func (o Options) readsTargets(id spiffeid.ID) bool {
	return slices.Contains(o.Readers, id) || slices.Contains(o.Frontends, id)
}

// isFrontend reports whether an ID is a frontend's, which no limit of connections closes. Members
// of FrontendDomain may be targets, too.
func (o Options) isFrontend(id spiffeid.ID) bool { return slices.Contains(o.Frontends, id) }
