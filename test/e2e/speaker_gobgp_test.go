package e2e

import (
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// newForeignGoBGP creates a host with gobgpd as its speaker.
func newForeignGoBGP(t *testing.T, vips ...string) *daemon {
	t.Helper()
	f := newForeignHost(t, vips...)
	f.session[0] = "--speaker-address=" + speakerAddress + ":10179"
	return f.startGoBGP("127.0.0.1:50051")
}

// startGoBGP starts gobgpd, which has one port for all sessions. api is the address of its API.
func (f *foreign) startGoBGP(api string) *daemon {
	f.t.Helper()
	need(f.t, lab.KindGoBGP)
	d := &daemon{foreign: f, conf: f.path("gobgpd.toml")}
	d.program = []string{"gobgpd", "-f", d.conf, "--api-hosts=" + api, "--pprof-disable"}
	d.frontends = []string{"--gateway-state=gobgp", "--speaker-socket=" + api}
	d.start(d.speakerConfig("gobgp", "--router-id=192.0.2.1"))
	return d
}

// gobgpd refuses connections for 5 s after a session.
func TestForeignGoBGP(t *testing.T) {
	t.Parallel()
	newForeignGoBGP(t, manyVIPs(1000)...).lives(t, "GoBGP 3", 3, 1000)
}

func TestForeignGoBGPConfirms(t *testing.T) {
	t.Parallel()
	d := newForeignGoBGP(t, vipA4, vipB4)
	const policy = "[[policy-definitions]]\n  name = \"vipgate-out\"\n"
	d.confirms(policy, `[[defined-sets.prefix-sets]]
  prefix-set-name = "dropped"
  [[defined-sets.prefix-sets.prefix-list]]
    ip-prefix = "`+vipB4+`"
`+policy+`  [[policy-definitions.statements]]
    [policy-definitions.statements.conditions.match-prefix-set]
      prefix-set = "dropped"
    [policy-definitions.statements.actions]
      route-disposition = "reject-route"
`)
}
