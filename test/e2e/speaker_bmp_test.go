package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func allAdvertised(count int) string { return fmt.Sprintf("%d of %[1]d VIPs advertised", count) }

// FRR sends its sessions over BMP, and not which routes it sends: status says so.
func TestForeignBMP(t *testing.T) {
	t.Parallel()
	need(t, lab.KindFRR)
	f := newForeignHost(t)
	bmp := []string{"--gateway-state=bmp", "--speaker-socket=127.0.0.1:11019"}
	f.startSpeaker(f.speakerConfig("frr", bmp...), "-M bmp")
	f.ready(true)
	p := f.frontend(announcerFirst, bmp...)
	f.waitCount(2)
	const unconfirmed = "not confirmed that it receives VIPs: the speaker does not report which routes it sends"
	f.waitStatus("FRRouting 8", "2 of 2 VIPs advertised", unconfirmed)
	start := time.Now()
	harness.Must(t, p.Kill())
	t.Logf("kill to the last withdrawal: %v", f.waitCount(0).Sub(start))
	f.frontend(announcerFirst, bmp...)
	f.waitCount(2)
	f.waitStatus("2 of 2 VIPs advertised")

	f.gatewayGoes(2)

	harness.Must(t, f.speaker.Daemon("bgpd").Kill())
	f.waitCount(0)
	f.waitStatus("0 of 2 VIPs advertised")
	harness.Must(t, f.speaker.StartDaemon("bgpd"))
	f.waitCount(2)
	f.waitStatus("2 of 2 VIPs advertised", unconfirmed)
}
