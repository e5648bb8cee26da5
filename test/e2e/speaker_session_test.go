package e2e

import (
	"net"
	"os"
	"testing"

	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// The session with the speaker of the host may have IPv6 addresses and a password. The frontend is
// in a pod, because a host would need both addresses, and FRR has no neighbor with one of its own.
func TestForeignOverIPv6(t *testing.T) {
	t.Parallel()
	const host, pod4, pod6 = "fd00:78::1", "10.78.0.2", "fd00:78::2"
	newHost := func(t *testing.T, port string) *foreign {
		t.Parallel()
		f := newForeignHost(t)
		f.pod = lab.NewNetNS(t)
		harness.Must(t, lab.Veth(f.Pod, "pod", f.pod, "eth0"))
		harness.Must(t, f.Pod.Addr("pod", "10.78.0.1/24", host+"/64"))
		harness.Must(t, f.pod.Addr("eth0", pod4+"/24", pod6+"/64"))
		harness.Must(t, os.WriteFile(f.path("password"), []byte(speakerconfig.Placeholder+"\n"), 0o644))
		f.first, f.session = pod6, []string{
			"--speaker-address=" + net.JoinHostPort(host, port), "--speaker-next-hop=" + pod4,
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
		harness.Must(f.t, p.Kill())
		f.waitCount(0)
	}
	t.Run("FRR", func(t *testing.T) {
		need(t, lab.KindFRR)
		f := newHost(t, "179")
		f.startSpeaker(f.speakerConfig("frr"))
		lives(f)
	})
	t.Run("BIRD", func(t *testing.T) {
		d := newHost(t, "179").startBIRD("2.0")
		lives(d.foreign, d.frontends...)
	})
	t.Run("GoBGP", func(t *testing.T) {
		f := newHost(t, "10179")
		d := f.startGoBGP("unix://" + f.path("gobgp.sock"))
		f.user = 0 // owns the socket
		lives(d.foreign, d.frontends...)
	})
}
