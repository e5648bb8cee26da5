package e2e

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// BIRD attracts traffic only once the rules of each family are installed.
func TestBIRDWaitsForSourceRouting(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	ip := func(args ...string) {
		_, err := f.pod.Namespace().Run(t.Context(), "ip", args...)
		f.must(err)
	}
	// A route in the blackhole table leaves the pod, so that IPv6 source routing is not effective.
	const prefix = "2001:db8:9::/64"
	ip("-6", "route", "add", prefix, "dev", lab.External, "table", "4097")
	f.startPod()
	f.waitFrontend("SourceRouting", false, prefix)
	f.waitFrontend("Stream", true)
	f.wantRoutes()
	ip("-6", "route", "del", prefix, "dev", lab.External, "table", "4097")
	f.wantRoutes(vipA4, vipA6)
	log := f.pod.Frontend.Output()
	cause, installed, bird := strings.Index(log, prefix), strings.Index(log,
		`msg="source routing installed"`), strings.Index(log, `msg="BIRD started"`)
	if cause < 0 || installed < cause || bird < installed {
		t.Errorf("BIRD did not wait:\n%s", log)
	}
}
