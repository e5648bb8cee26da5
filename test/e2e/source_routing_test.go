package e2e

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// Issue 10, section 3: BIRD attracts traffic only once the rules of each family are installed.
func TestBIRDWaitsForSourceRouting(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	ip := func(args ...string) {
		_, err := w.pod.Namespace().Run(t.Context(), "ip", args...)
		w.must(err)
	}
	// A route out of the blackhole's table: IPv6 has no source routing.
	const prefix = "2001:db8:9::/64"
	ip("-6", "route", "add", prefix, "dev", lab.External, "table", "4097")
	w.startPod()
	w.waitFrontend("SourceRouting", false, prefix)
	w.waitFrontend("Stream", true)
	w.wantRoutes()
	ip("-6", "route", "del", prefix, "dev", lab.External, "table", "4097")
	w.wantRoutes(vipA4, vipA6)
	log := w.pod.Frontend.Output()
	cause, stands, bird := strings.Index(log, prefix), strings.Index(log, `msg="source routing stands"`), strings.Index(log, `msg="BIRD started"`)
	if cause < 0 || stands < cause || bird < stands {
		t.Errorf("BIRD did not wait:\n%s", log)
	}
}
