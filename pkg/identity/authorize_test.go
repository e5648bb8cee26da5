package identity_test

import (
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/identitytest"
)

// An ID is authorized if it is in the list or a member of the trust domain, and not otherwise.
// The zero ID is never authorized, although it is a member of the zero trust domain.
func TestAuthorizeEveryCombination(t *testing.T) {
	id, domain := spiffeid.RequireFromString, spiffeid.RequireTrustDomainFromString
	peers := []spiffeid.ID{
		{},
		id("spiffe://a.org/lb"), id("spiffe://a.org/lb2"), id("spiffe://a.org/lb/x"), id("spiffe://a.org"),
		id("spiffe://b.org/lb"), id("spiffe://b.a.org/lb"), id("spiffe://a.org.b/lb"), id("spiffe://a.or/glb"),
	}
	for _, td := range []spiffeid.TrustDomain{{}, domain("a.org"), domain("b.org")} {
		for _, ids := range [][]spiffeid.ID{nil, peers[1:2], peers[5:6], peers[1:3]} {
			want := map[spiffeid.ID]bool{}
			for _, p := range ids {
				want[p] = true
			}
			for _, p := range peers {
				if !td.IsZero() && p.TrustDomain() == td {
					want[p] = true
				}
			}
			list := append([]spiffeid.ID{}, ids...)
			authorize := identity.AuthorizeMember(td, list...)
			for i := range list {
				list[i] = peers[2] // the authorizer has a copy of the list
			}
			for _, p := range peers {
				if err := authorize(p, nil); (err == nil) != want[p] {
					t.Errorf("trust domain %q, IDs %v, peer %q: %v", td, ids, p, err)
				}
				if td.IsZero() {
					if err := identity.Authorize(ids...)(p, nil); (err == nil) != want[p] {
						t.Errorf("IDs %v, peer %q: %v", ids, p, err)
					}
				}
			}
		}
	}
}

// Trust in a federated domain authenticates its members but does not authorize them.
func TestOwnDomainExcludesFederatedOne(t *testing.T) {
	a, b := identitytest.NewCA(t, "a.org"), identitytest.NewCA(t, "b.org")
	source := func(svid *x509svid.SVID) *identity.Source {
		s := identity.NewManualSource(identity.Options{})
		s.Offer(x509bundle.NewSet(a.Bundle(), b.Bundle()), svid)
		return s
	}
	server := identity.NewManualSource(identity.Options{})
	path, w := serve(t, identity.NewCredentials(server,
		identity.CredentialOptions{Authorize: identity.AuthorizeOwnDomain(server)}))
	call := func(svid *x509svid.SVID) error {
		anyServer := identity.AuthorizeMember(a.ID("/lb").TrustDomain(), b.ID("/lb"))
		creds := identity.CredentialOptions{Authorize: anyServer}
		return check(t, client(t, path, identity.NewCredentials(source(svid), creds)))
	}
	member, federated := a.SVID(a.ID("/frontend"), time.Hour), b.SVID(b.ID("/frontend"), time.Hour)
	if err := identity.AuthorizeOwnDomain(server)(member.ID, nil); err == nil {
		t.Error("a peer is authorized before the own trust domain is known")
	}
	both := x509bundle.NewSet(a.Bundle(), b.Bundle())
	server.Offer(both, a.SVID(a.ID("/lb"), time.Hour))
	if err := call(member); err != nil || w.caller.Load() != member.ID {
		t.Errorf("a member is refused: %v, caller %v", err, w.caller.Load())
	}
	if err := call(federated); err == nil {
		t.Error("a member of a federated trust domain is authorized")
	}
	server.Offer(both, b.SVID(b.ID("/lb"), time.Hour)) // each handshake uses the current trust domain
	if err := call(federated); err != nil {
		t.Errorf("a member of the new trust domain is refused: %v", err)
	}
	if err := call(member); err == nil {
		t.Error("a member of the earlier trust domain is authorized")
	}
}

// Credentials without an authorizer reject every peer, trusted or not.
func TestNoAuthorizer(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	own := ca.Source(ca.SVID(ca.ID("/lb"), time.Hour))
	path, w := serve(t, identity.NewCredentials(own, identity.CredentialOptions{}))
	creds := identity.CredentialOptions{Authorize: identity.Authorize(ca.ID("/lb"))}
	if err := check(t, client(t, path, identity.NewCredentials(own, creds))); err == nil || w.caller.Load() != nil {
		t.Errorf("%v came through: %v", w.caller.Load(), err)
	}
	open, _ := serve(t, identity.NewCredentials(own, creds))
	if err := check(t, client(t, open, identity.NewCredentials(own, identity.CredentialOptions{}))); err == nil {
		t.Error("a client without an authorizer accepts a server")
	}
}

// Trust follows each update of the origin, even if its SVID has another ID, is expired or is not
// yet valid: a removed authority is no longer trusted.
func TestTrustFollowsEveryUpdate(t *testing.T) {
	first, second := identitytest.NewCA(t, "a.org"), identitytest.NewCA(t, "a.org")
	federated := identitytest.NewCA(t, "b.org")
	id, now := first.ID("/lb"), time.Now()
	for name, svid := range map[string]*x509svid.SVID{
		"usable":        second.SVID(id, time.Hour),
		"another ID":    second.SVID(first.ID("/other"), time.Hour),
		"expired":       second.SVIDBetween(id, now.Add(-time.Hour), now.Add(-time.Minute)),
		"not yet valid": second.SVIDBetween(id, now.Add(time.Hour), now.Add(2*time.Hour)),
	} {
		t.Run(name, func(t *testing.T) {
			s := identity.NewManualSource(identity.Options{ID: id})
			s.Offer(x509bundle.NewSet(first.Bundle(), federated.Bundle()), first.SVID(id, time.Hour))
			s.Offer(x509bundle.NewSet(second.Bundle()), svid)
			bundle, err := s.GetX509BundleForTrustDomain(id.TrustDomain())
			if err != nil || !bundle.Equal(second.Bundle()) {
				t.Errorf("the earlier authority is trusted: %v", err)
			}
			if _, err := s.GetX509BundleForTrustDomain(federated.ID("/x").TrustDomain()); err == nil {
				t.Error("a trust domain that was removed is trusted")
			}
		})
	}
}
