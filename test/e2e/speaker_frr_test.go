package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Addresses of the session between a frontend and the FRR of its host: two networks on lo, of which
// FRR knows one address each.
const (
	speakerAddress  = "10.77.0.1"
	announcerFirst  = "10.77.0.2"
	announcerSecond = "10.77.0.3"
	nextHop6        = "fd00:77::2"
)

const unprivileged = 65534

// foreign is a host whose FRR another program runs and configures. Its gateway only records.
type foreign struct {
	t *testing.T
	*lab.Lab
	speaker  *lab.FRR
	receiver *lab.Receiver
	config   string     // of the speaker
	user     int        // of the frontend
	caps     string     // capabilities of the frontend, as setpriv takes them
	source   []string   // flags of the frontend's source of readiness
	pod      *lab.NetNS // of the frontends
	first    string     // address of the first frontend
	session  []string   // flags of the session with the speaker; the first one is its address
}

const foreignTrench = `trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%s]
  gateways:
    - {name: gateway-a4, address: 169.254.100.150, localASN: 8103, remoteASN: 4248829953, remotePort: 10179}
    - {name: gateway-a6, address: "fd00:100::150", localASN: 8103, remoteASN: 4248829953, remotePort: 10179}
streams:
  - {name: stream-a, vips: [%[1]s]}
`

// newForeign creates a host with FRR, which has the configuration that speaker-config prints.
func newForeign(t *testing.T, vips ...string) *foreign {
	t.Helper()
	need(t, lab.KindFRR)
	f := newForeignHost(t, vips...)
	f.startSpeaker(f.speakerConfig("frr"))
	_, err := f.receiver.Established(harness.Context(t, waitTimeout))
	harness.Must(t, err)
	return f
}

// foreignOf has the usual session over IPv4. source are the flags of the source of readiness.
func foreignOf(t *testing.T, l *lab.Lab, user int, source ...string) *foreign {
	return &foreign{
		t: t, Lab: l, user: user, caps: "-all", source: source, pod: l.Pod, first: announcerFirst,
		session: []string{"--speaker-address=" + speakerAddress, "--speaker-next-hop=" + nextHop6},
	}
}

// newForeignHost creates a host without a speaker.
func newForeignHost(t *testing.T, vips ...string) *foreign {
	t.Helper()
	l, err := lab.New()
	harness.Must(t, err)
	f := foreignOf(t, l, unprivileged, "--readiness-dir="+filepath.Join(l.Dir, "readiness"))
	t.Cleanup(func() {
		if f.receiver != nil {
			harness.Check(t, f.receiver.Close())
		}
		harness.Check(t, l.Close())
	})
	harness.Must(t, l.Pod.Addr("lo", "10.77.0.1/29", "fd00:77::1/126"))
	// As /var/run/frr and the directories of the host: search permission for all.
	harness.Must(t, os.Chmod(l.Dir, 0o755))
	for _, dir := range []string{"readiness", "state"} {
		harness.Must(t, os.Mkdir(filepath.Join(l.Dir, dir), 0o777))
		harness.Must(t, os.Chmod(filepath.Join(l.Dir, dir), 0o777))
	}
	if vips == nil {
		vips = []string{vipA4, `"` + vipA6 + `"`}
	}
	trench := fmt.Appendf(nil, foreignTrench, strings.Join(vips, ", "))
	harness.Must(t, os.WriteFile(f.path("trench.yaml"), trench, 0o644))
	f.receiver, err = lab.StartReceiver(l.Gateway, lab.ReceiverA())
	harness.Must(t, err)
	return f
}

// speakerConfig returns the configuration of a kind of speaker.
func (f *foreign) speakerConfig(kind string, extra ...string) string {
	f.t.Helper()
	args := append([]string{"speaker-config", kind}, f.speakerArgs(f.first)...)
	out, err := f.Pod.Run(f.t.Context(), filepath.Join(binaries, "frontend"), append(args, extra...)...)
	harness.Must(f.t, err)
	return out
}

func (f *foreign) path(name string) string { return filepath.Join(f.Dir, name) }

// speakerArgs are the arguments of the trench and of the session with the speaker.
func (f *foreign) speakerArgs(local string) []string {
	return append([]string{
		"--trench-file=" + f.path("trench.yaml"), "--speaker-local=" + local, "--speaker-as=8103",
		"--speaker-password-file=none",
	}, f.session...)
}

// startSpeaker starts FRR with a configuration.
// extra are further arguments of bgpd.
func (f *foreign) startSpeaker(config string, extra ...string) {
	f.t.Helper()
	f.config = config
	var err error
	f.speaker, err = lab.StartFRR(f.Pod, f.Dir, lab.GatewayConfig{
		Name: "speaker", BFD: strings.Contains(config, " bfd"),
		Text: "! bgpd_options=\"" + strings.Join(append(extra, "-p 179"), " ") + "\"\n" + config,
	})
	harness.Must(f.t, err)
	harness.Must(f.t, os.Chmod(f.path("speaker"), 0o755))
	f.t.Cleanup(func() {
		for _, p := range f.speaker.Processes() {
			_ = p.Kill()
		}
	})
}

// frontend starts a frontend with an address, as a user in FRR's group.
func (f *foreign) frontend(local string, extra ...string) *lab.Process {
	f.t.Helper()
	name := "frontend-" + local
	args := append([]string{
		"setpriv", fmt.Sprint("--reuid=", f.user), fmt.Sprint("--regid=", f.user), "--groups=frrvty",
		"--bounding-set=" + f.caps, "--inh-caps=" + f.caps, "--ambient-caps=" + f.caps, "--no-new-privs",
		filepath.Join(binaries, "frontend"), "run", "--speaker=external",
		"--speaker-socket=" + f.path("speaker/bgpd.vty"),
		"--bird-dir=" + f.path("state"), "--admin-socket=unix://" + f.admin(local),
		"--health-address=127.0.0.1:778" + local[len(local)-1:],
		"--metrics-address=127.0.0.1:222" + local[len(local)-1:], "--log-format=text", noDrain,
	}, slices.Concat(f.source, f.speakerArgs(local), extra)...)
	p, err := f.Start(f.pod, name, args...)
	harness.Must(f.t, err)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("== %s\n%s", name, p.Tail(40))
		}
	})
	return p
}

func (f *foreign) admin(local string) string { return f.path("state/admin-" + local + ".sock") }

func (f *foreign) status(local string) string {
	out, _ := f.pod.Run(f.t.Context(), filepath.Join(binaries, "frontend"), "status",
		"--admin-socket=unix://"+f.admin(local))
	return out
}

// waitStatus waits until `frontend status` contains texts.
func (f *foreign) waitStatus(texts ...string) {
	f.t.Helper()
	err := lab.Eventually(harness.Context(f.t, waitTimeout), 50*time.Millisecond, func() error {
		out := f.status(f.first)
		for _, text := range texts {
			if !strings.Contains(out, text) {
				return fmt.Errorf("status lacks %q:\n%s", text, out)
			}
		}
		return nil
	})
	harness.Must(f.t, err)
}

func (f *foreign) ready(is bool) {
	f.t.Helper()
	file := f.path("readiness/lb-ready-stream-a")
	if is {
		harness.Must(f.t, os.WriteFile(file, nil, 0o644))
	} else {
		harness.Must(f.t, os.Remove(file))
	}
}

// waitCount waits until the gateway has n routes, and returns when it had.
func (f *foreign) waitCount(n int) time.Time {
	f.t.Helper()
	at, err := f.receiver.WaitCount(harness.Context(f.t, waitTimeout), n)
	if err != nil {
		out := ""
		if f.speaker != nil {
			out, _ = f.speaker.Command(f.t.Context(), "show bgp summary")
		}
		f.t.Fatalf("%v\n%s\n%s", err, out, f.status(f.first))
	}
	return at
}

// manyVIPs returns n VIPs of IPv4.
func manyVIPs(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("20.0.%d.%d/32", i/250, 1+i%250))
	}
	return list
}

func TestForeignFRR(t *testing.T) {
	t.Parallel()
	f := newForeign(t)
	p := f.frontend(announcerFirst, visibleDrain)
	f.waitStatus("no readiness file", "run by another program, which owns source routing")
	if n := len(f.receiver.Table()); n != 0 {
		t.Fatalf("the gateway has %d routes before any VIP is ready", n)
	}
	f.ready(true)
	f.waitCount(2)
	f.waitStatus("FRR 8", "gateway-a4", "gateway-a6", "2 of 2 VIPs advertised")

	// The path is the same as BIRD's, and a VIP that is not ready is withdrawn.
	for prefix, attributes := range f.receiver.Table() {
		if !slices.Equal(attributes.ASPath, []uint32{8103}) {
			t.Errorf("%s has the path %v", prefix, attributes.ASPath)
		}
	}
	mark := f.receiver.Mark()
	f.ready(false)
	f.waitCount(0)
	f.ready(true)
	f.waitCount(2)

	// zebra gets the gateways' routes, and none to VIPs.
	for command, isRouted := range map[string]bool{
		"show ip route 20.0.0.1/32": false, "show ipv6 route 2000::1/128": false, "show ip route 0.0.0.0/0": true,
	} {
		out, err := f.Pod.Run(t.Context(), "vtysh", "--vty_socket", f.path("speaker"), "-d", "zebra", "-c", command)
		harness.Must(t, err)
		if strings.Contains(out, `Known via "bgp"`) != isRouted {
			t.Errorf("%s: %s", command, out)
		}
	}

	// A stop de-prefers first.
	harness.Must(t, lab.Stop(harness.Context(t, waitTimeout), p))
	f.waitCount(0)
	isShutdown := func(u lab.PrefixUpdate) bool { return u.Attributes.GracefulShutdown() }
	if !slices.ContainsFunc(f.receiver.Since(mark), isShutdown) {
		t.Error("no VIP was de-preferred before the end")
	}
	condition := strings.NewReplacer("service=BIRD", "", "; BIRD: ", "")
	for line := range strings.Lines(p.Output()) {
		if strings.Contains(condition.Replace(line), "BIRD") {
			t.Errorf("the log names BIRD: %s", line)
		}
	}
}

// A frontend that dies, hangs or starts again, and an FRR that restarts.
func TestForeignFRRLease(t *testing.T) {
	t.Parallel()
	f := newForeign(t, manyVIPs(1000)...)
	f.ready(true)
	var withdrawn []time.Duration
	for range 5 {
		p := f.frontend(announcerFirst)
		f.waitCount(1000)
		f.waitStatus("1000 of 1000 VIPs advertised")
		start := time.Now()
		harness.Must(t, p.Kill())
		withdrawn = append(withdrawn, f.waitCount(0).Sub(start))
	}
	slices.Sort(withdrawn)
	t.Logf("kill to the last of 1000 withdrawals: %v", withdrawn)
	p := f.frontend(announcerFirst)
	f.waitCount(1000)
	start := time.Now()
	harness.Must(t, p.Signal(unix.SIGSTOP))
	t.Logf("hang to the last of 1000 withdrawals: %v", f.waitCount(0).Sub(start))
	harness.Must(t, p.Signal(unix.SIGCONT))
	f.waitCount(1000)

	// The speaker is killed and starts again.
	harness.Must(t, f.speaker.Daemon("bgpd").Kill())
	f.waitCount(0)
	harness.Must(t, f.speaker.StartDaemon("bgpd"))
	f.waitCount(1000)
	f.waitStatus("1000 of 1000 VIPs advertised")
}

// Advertised means confirmed by the speaker, whose policy and sessions the frontend does not own.
func TestForeignFRRConfirms(t *testing.T) {
	t.Parallel()
	f := newForeign(t, vipA4, vipB4)
	f.ready(true)
	f.frontend(announcerFirst)
	f.waitCount(2)
	command := func(lines ...string) {
		t.Helper()
		args := []string{"vtysh", "--vty_socket", f.path("speaker"), "-d", "bgpd", "-c", "configure terminal"}
		for _, line := range lines {
			args = append(args, "-c", line)
		}
		_, err := f.Pod.Run(t.Context(), args[0], args[1:]...)
		harness.Must(t, err)
	}
	// The speaker's policy drops one VIP.
	command("no ip prefix-list VIPGATE4 seq 20 permit "+vipB4, "end", "clear bgp * soft")
	f.waitCount(1)
	f.waitStatus("1 of 2 VIPs advertised", "receives 1 of 2 VIPs")
	command("ip prefix-list VIPGATE4 seq 20 permit "+vipB4, "end", "clear bgp * soft")
	f.waitCount(2)
	f.waitStatus("2 of 2 VIPs advertised")
	// Without a session with a gateway nothing is advertised.
	command("router bgp 8103", "neighbor 169.254.100.150 shutdown")
	f.waitStatus("0 of 2 VIPs advertised", "Idle (Admin)")
	command("router bgp 8103", "no neighbor 169.254.100.150 shutdown")
	f.waitCount(2)
	f.waitStatus("2 of 2 VIPs advertised")
}

// Two frontends feed one speaker, one of which accepts the speaker's connection.
func TestForeignFRRTwoFrontends(t *testing.T) {
	t.Parallel()
	f := newForeign(t)
	f.ready(true)
	_, err := f.Pod.Run(t.Context(), "vtysh", "--vty_socket", f.path("speaker"), "-d", "bgpd", "-c", "configure terminal",
		"-c", "router bgp 8103", "-c", "neighbor 10.77.0.3 remote-as 8103", "-c", "neighbor 10.77.0.3 port 1791",
		"-c", "neighbor 10.77.0.3 timers 1 3", "-c", "neighbor 10.77.0.3 timers connect 1",
		"-c", "neighbor 10.77.0.3 password listens", "-c", "address-family ipv4 unicast",
		"-c", "neighbor 10.77.0.3 activate", "-c", "exit", "-c", "address-family ipv6 unicast",
		"-c", "neighbor 10.77.0.3 activate")
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(f.path("password"), []byte("listens\n"), 0o644))
	first := f.frontend(announcerFirst)
	f.waitCount(2)
	second := f.frontend(announcerSecond, "--speaker-listen=1791", "--speaker-password-file="+f.path("password"))
	paths := func(n int) {
		t.Helper()
		err := lab.Eventually(harness.Context(t, waitTimeout), 50*time.Millisecond, func() error {
			out, err := f.speaker.Command(t.Context(), "show bgp ipv4 unicast "+vipA4)
			if err == nil && !strings.Contains(out, fmt.Sprintf("Paths: (%d available", n)) {
				err = fmt.Errorf("want %d paths: %s", n, out)
			}
			return err
		})
		harness.Must(t, err)
	}
	paths(2)
	mark := f.receiver.Mark()
	harness.Must(t, first.Kill())
	paths(1)
	if slices.ContainsFunc(f.receiver.Since(mark), func(u lab.PrefixUpdate) bool { return u.Withdrawn }) {
		t.Error("a VIP was withdrawn although a frontend announces it")
	}
	harness.Must(t, second.Kill())
	f.waitCount(0)
	f.frontend(announcerSecond, "--speaker-listen=1791", "--speaker-password-file="+f.path("password"))
	f.waitCount(2)
}

// The speaker's BFD has the times of the trench file.
func TestForeignFRRBFD(t *testing.T) {
	t.Parallel()
	need(t, lab.KindFRR)
	f := newForeignHost(t)
	text, err := os.ReadFile(f.path("trench.yaml"))
	harness.Must(t, err)
	edited := strings.ReplaceAll(string(text), "10179}", "10179, bfd: {minTx: 400ms, minRx: 200ms, multiplier: 5}}")
	harness.Must(t, os.WriteFile(f.path("trench.yaml"), []byte(edited), 0o644))
	f.startSpeaker(f.speakerConfig("frr"))
	harness.Must(t, lab.Eventually(harness.Context(t, waitTimeout), 50*time.Millisecond, func() error {
		out, err := f.Pod.Run(t.Context(), "vtysh", "--vty_socket", f.path("speaker"), "-d", "bfdd", "-c",
			"show bfd peers json")
		for _, want := range []string{`"transmit-interval":400`, `"receive-interval":200`, `"detect-multiplier":5`} {
			if err == nil && strings.Count(out, want) != 2 {
				err = fmt.Errorf("two peers need %s: %s", want, out)
			}
		}
		return err
	}))
}

// With --gateway-state=none the operator vouches for the sessions, and status says so.
func TestForeignUnobserved(t *testing.T) {
	t.Parallel()
	f := newForeign(t)
	f.ready(true)
	f.frontend(announcerFirst, "--gateway-state=none")
	f.waitCount(2)
	f.waitStatus("not observed (--gateway-state=none)", "2 of 2 VIPs advertised")
}
