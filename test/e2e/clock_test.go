package e2e

import (
	"testing"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/vipgate/vipgate/test/lab"
)

// Design section 9: "clock jumps | … New handshakes judge certificates by wall time and say so when they fail". A clock
// that was set back by an hour and an SVID that begins in an hour are the same to whoever judges.
func TestHandshakeThatFailsByTheClockSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	a := w.stranger()
	lb, frontend := &volume{w: w, dir: w.path("svid-lb")}, &volume{w: w, dir: w.path("svid-frontend")}
	lb.swap(a, w.mint(a, lab.LBID))
	frontend.swap(a, w.between(a, lab.FrontendID, time.Hour, 2*time.Hour))

	w.startLBAs(nil, as(w.pod.LBArgs(), "--identity=files", "--svid-dir="+lb.dir))
	w.startFrontendAs(nil, as(w.pod.FrontendArgs(), "--identity=files", "--svid-dir="+frontend.dir))
	w.waitFrontend("Identity", false, "not yet valid")

	// Toward a peer with such a clock: the LB says whose certificate, and by whose clock.
	conn := w.client(credentials.NewTLS(showing(w.between(a, lab.OperatorID, time.Hour, 2*time.Hour))))
	if _, err := w.ask(conn); err == nil {
		t.Error("an SVID whose time has not come was let in")
	}
	w.waitLine(w.pod.LB, 0, "client refused", "reason=not_yet_valid", lab.OperatorID, "the clock here says")

	frontend.swap(a, w.mint(a, lab.FrontendID))
	w.wantRoutes(vipA4, vipA6)
}
