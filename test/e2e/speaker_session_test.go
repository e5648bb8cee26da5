package e2e

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// The session with the speaker may have IPv6 addresses and a password.
func TestForeignOverIPv6(t *testing.T) {
	t.Parallel()
	const address = "fd00:77::1"
	newHost := func(t *testing.T, port string) *foreign {
		t.Parallel()
		f := newForeignHost(t)
		harness.Must(t, os.WriteFile(f.path("password"), []byte(speakerconfig.Placeholder+"\n"), 0o644))
		f.first, f.session = nextHop6, []string{
			"--speaker-address=" + address + port, "--speaker-next-hop=" + announcerFirst,
			"--speaker-password-file=" + f.path("password"),
		}
		return f
	}
	lives := func(f *foreign, frontends ...string) {
		f.t.Helper()
		f.ready(true)
		p := f.frontend(f.first, frontends...)
		f.waitCount(2)
		f.waitStatus("2 of 2 VIPs advertised")
		harness.Must(f.t, p.Signal(unix.SIGKILL))
		f.waitCount(0)
	}
	t.Run("FRR", func(t *testing.T) {
		need(t, lab.KindFRR)
		f := newHost(t, "")
		f.startSpeaker(f.speakerConfig("frr"))
		lives(f)
	})
	t.Run("BIRD", func(t *testing.T) {
		d := newHost(t, "").startBIRD("2.0")
		lives(d.foreign, d.frontends...)
	})
	t.Run("GoBGP", func(t *testing.T) {
		d := newHost(t, ":10179").startGoBGP()
		lives(d.foreign, d.frontends...)
	})
}
