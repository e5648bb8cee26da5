package e2e

import (
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// daemon is a speaker with one process, in the host of a foreign.
type daemon struct {
	*foreign
	process *lab.Process
	program []string
	conf    string // path of its configuration
	socket  string // for the frontend, which runs as another user; "" without one
	// frontends are the arguments of frontends.
	frontends []string
}

// start writes the configuration and starts the daemon.
func (d *daemon) start(config string) {
	d.t.Helper()
	d.config = config
	harness.Must(d.t, os.WriteFile(d.conf, []byte(config), 0o644))
	if d.socket != "" {
		_ = os.Remove(d.socket) // a killed daemon leaves it
	}
	var err error
	d.process, err = d.Start(d.Pod, "speaker", d.program...)
	harness.Must(d.t, err)
	process := d.process
	d.t.Cleanup(func() {
		if d.t.Failed() {
			d.t.Logf("== speaker\n%s", process.Tail(30))
		}
	})
	if d.socket != "" {
		// As for members of the daemon's group. BIRD greets once it has set its own mode.
		harness.Must(d.t, lab.Eventually(harness.Context(d.t, waitTimeout), 5*time.Millisecond, func() error {
			conn, err := net.DialTimeout("unix", d.socket, time.Second)
			if err != nil {
				return err
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
				return err
			}
			_, err = conn.Read(make([]byte, 1))
			return err
		}))
		harness.Must(d.t, os.Chmod(d.socket, 0o666))
	}
}

// newForeignBIRD creates a host with BIRD as its speaker.
func newForeignBIRD(t *testing.T, version string, vips ...string) *daemon {
	t.Helper()
	return newForeignHost(t, vips...).startBIRD(version)
}

func (f *foreign) startBIRD(version string) *daemon {
	f.t.Helper()
	executable, err := lab.BIRDOf(version)
	harness.Must(f.t, err)
	if executable == "" {
		lab.Skip(f.t, "BIRD "+version+" (test/setup/birds.sh)")
	}
	d := &daemon{foreign: f, conf: f.path("bird.conf"), socket: f.path("bird.ctl")}
	d.program = []string{executable, "-f", "-c", d.conf, "-s", d.socket}
	d.frontends = []string{"--gateway-state=bird", "--speaker-socket=" + d.socket}
	d.start("log stderr all;\n" + d.speakerConfig("bird"))
	return d
}

// lives checks the lease of frontends, and that the state of gateways and the daemon are followed.
// The VIPs are of IPv4.
func (d *daemon) lives(t *testing.T, version string, kills, count int) {
	t.Helper()
	p := d.frontend(announcerFirst, d.frontends...)
	d.waitStatus("no readiness file")
	if n := len(d.receiver.Table()); n != 0 {
		t.Fatalf("the gateway has %d routes before any VIP is ready", n)
	}
	d.ready(true)
	d.waitCount(count)
	d.waitStatus(version, "gateway-a4", "gateway-a6", allAdvertised(count))
	for prefix, attributes := range d.receiver.Table() {
		if !slices.Equal(attributes.ASPath, []uint32{8103}) {
			t.Fatalf("%s has the path %v", prefix, attributes.ASPath)
		}
	}
	var withdrawn []time.Duration
	for range kills {
		start := time.Now()
		harness.Must(t, p.Kill())
		withdrawn = append(withdrawn, d.waitCount(0).Sub(start))
		p = d.frontend(announcerFirst, d.frontends...)
		d.waitCount(count)
		d.waitStatus(allAdvertised(count))
	}
	slices.Sort(withdrawn)
	t.Logf("%s: kill to the last of %d withdrawals: %v", version, count, withdrawn)
	start := time.Now()
	harness.Must(t, p.Signal(unix.SIGSTOP))
	t.Logf("%s: hang to the last of %d withdrawals: %v", version, count, d.waitCount(0).Sub(start))
	harness.Must(t, p.Signal(unix.SIGCONT))
	d.waitCount(count)
	d.waitStatus(allAdvertised(count))

	d.gatewayGoes(count)

	// The speaker is killed and starts again.
	harness.Must(t, d.process.Kill())
	d.waitCount(0)
	d.start(d.config)
	d.waitCount(count)
	d.waitStatus(allAdvertised(count))
}

// gatewayGoes checks that nothing is advertised without a session with a gateway.
func (f *foreign) gatewayGoes(count int) {
	f.t.Helper()
	harness.Must(f.t, f.receiver.Refuse())
	f.receiver.Reset()
	f.waitStatus("0 of ", "no gateway is up")
	harness.Must(f.t, f.receiver.Listen())
	f.waitCount(count)
	f.waitStatus(allAdvertised(count))
}

// confirms checks that a VIP which the speaker's changed configuration drops is not advertised.
func (d *daemon) confirms(old, changed string) {
	d.t.Helper()
	d.ready(true)
	d.frontend(announcerFirst, d.frontends...)
	d.waitCount(2)
	d.waitStatus("2 of 2 VIPs advertised")
	config := strings.ReplaceAll(d.config, old, changed)
	if config == d.config {
		d.t.Fatalf("no %q in\n%s", old, config)
	}
	harness.Must(d.t, d.process.Kill())
	d.start(config)
	d.waitStatus("1 of 2 VIPs advertised", "receives 1 of 2 VIPs")
	if n := len(d.receiver.Table()); n != 1 {
		d.t.Errorf("the gateway has %d routes", n)
	}
}

func TestForeignBIRD(t *testing.T) {
	t.Parallel()
	for _, version := range lab.BIRDs() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			newForeignBIRD(t, version, manyVIPs(1000)...).lives(t, "BIRD "+version, 5, 1000)
		})
	}
}

func TestForeignBIRDConfirms(t *testing.T) {
	t.Parallel()
	d := newForeignBIRD(t, "2.0", vipA4, vipB4)
	d.confirms("export filter {\n", "export filter {\nif net = "+vipB4+" then reject;\n")
}
