package e2e

import (
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/test/lab"
)

// New handshakes check certificates against wall time, and their errors name it
// (docs/architecture.md#failure-table). A clock that was set back by an hour has the same effect
// as an SVID that begins in an hour.
func TestHandshakeClockError(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	a := f.stranger()
	lb, frontend := &volume{f: f, dir: f.path("svid-lb")}, &volume{f: f, dir: f.path("svid-frontend")}
	lb.swap(a, f.mint(a, lab.LBID))
	frontend.swap(a, f.between(a, lab.FrontendID, time.Hour, 2*time.Hour))

	f.startLBAs(nil, as(f.pod.LBArgs(), "--identity=files", "--svid-dir="+lb.dir))
	f.startFrontendAs(nil, as(f.pod.FrontendArgs(), "--identity=files", "--svid-dir="+frontend.dir))
	f.waitFrontend("Identity", false, "not yet valid")

	// A peer has a wrong clock: the LB logs the certificate and the clock that it was checked
	// against.
	conn := f.client(credentials.NewTLS(showing(f.between(a, lab.OperatorID, time.Hour, 2*time.Hour))))
	if _, err := f.ask(conn); err == nil {
		t.Error("an SVID whose time has not come was let in")
	}
	f.waitLine(f.pod.LB, 0, "client refused", "reason=not_yet_valid", lab.OperatorID, "local clock:")

	frontend.swap(a, f.mint(a, lab.FrontendID))
	f.wantRoutes(vipA4, vipA6)
}
