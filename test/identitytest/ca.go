package identitytest

import (
	"os"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
)

// CA is a certificate authority of one trust domain.
type CA struct {
	tb        testing.TB
	td        spiffeid.TrustDomain
	authority *identity.DevAuthority
}

// NewCA returns an authority for the trust domain, such as "example.org".
func NewCA(tb testing.TB, trustDomain string) *CA {
	tb.Helper()
	authority, err := identity.NewDevAuthority()
	harness.Must(tb, err)
	return &CA{tb: tb, td: spiffeid.RequireTrustDomainFromString(trustDomain), authority: authority}
}

// ID returns the ID with that path, such as "/lb", in the trust domain.
func (c *CA) ID(path string) spiffeid.ID { return spiffeid.RequireFromPath(c.td, path) }

// SVID signs an SVID that is valid for ttl from now. Certificate times are whole seconds; the end
// is rounded up.
func (c *CA) SVID(id spiffeid.ID, ttl time.Duration) *x509svid.SVID {
	c.tb.Helper()
	now := time.Now()
	return c.SVIDBetween(id, now, now.Add(ttl))
}

// SVIDBetween signs an SVID that is valid in the interval, which may be in the past or future. The
// ID may be of another trust domain.
func (c *CA) SVIDBetween(id spiffeid.ID, notBefore, notAfter time.Time) *x509svid.SVID {
	c.tb.Helper()
	svid, err := c.authority.Mint(id, notBefore, notAfter)
	harness.Must(c.tb, err)
	return svid
}

// Bundle returns the authority as the bundle of its trust domain.
func (c *CA) Bundle() *x509bundle.Bundle { return c.authority.Bundle(c.td) }

// WriteFiles writes the SVID and the bundle to dir, for [identity.NewFiles].
func (c *CA) WriteFiles(dir string, svid *x509svid.SVID) {
	c.tb.Helper()
	harness.Must(c.tb, c.authority.WriteFiles(dir, svid))
}

// Source returns a running source with the SVID, which must be valid, that trusts the authority. It
// ends with the test.
func (c *CA) Source(svid *x509svid.SVID) *identity.Source {
	c.tb.Helper()
	dir := ShortDir(c.tb)
	c.WriteFiles(dir, svid)
	src, err := identity.NewFiles(dir, identity.Options{})
	harness.Must(c.tb, err)
	Run(c.tb, src)
	select {
	case <-src.Ready():
	case <-time.After(waitLimit):
		c.tb.Fatalf("%s was not ready: %v", src, src.Status().Load().Err)
	}
	return src
}

// waitLimit bounds every wait for a condition.
const waitLimit = 20 * time.Second

// Run runs the source until the test ends, or until the returned function is called, and waits for
// it.
func Run(tb testing.TB, src *identity.Source) (stop func()) {
	tb.Helper()
	return harness.Run(tb, src.Run)
}

// WaitStatus waits until the status of the source meets the condition and returns it.
func WaitStatus(tb testing.TB, src *identity.Source, what string, wanted func(identity.Status) bool) identity.Status {
	tb.Helper()
	deadline := time.After(waitLimit)
	for {
		st, changed := src.Status().Get()
		if wanted(st) {
			return st
		}
		select {
		case <-changed:
		case <-deadline:
			tb.Fatalf("%s: still not %s: %+v", src, what, st)
		}
	}
}

// ShortDir creates a directory whose path is short enough for unix sockets and removes it when the
// test ends.
func ShortDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(tb, err)
	tb.Cleanup(func() { harness.Must(tb, os.RemoveAll(dir)) })
	return dir
}
