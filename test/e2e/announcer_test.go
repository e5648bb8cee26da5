package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// loopbackBIRD is BIRD's address in the session with the announcer.
const loopbackBIRD = "127.0.0.1:1790"

// wantNotAdvertised waits until status, metrics, health and the report to lb show the VIPs as
// ready but not advertised, with a reason.
func (f *fixture) wantNotAdvertised(reason string, vips ...string) {
	f.t.Helper()
	for _, v := range vips {
		f.wantHealth(lab.FrontendHealth, "vip/"+v, healthNotServing)
	}
	full := "ADVERTISEMENT_REASON_" + strings.ToUpper(reason)
	f.waitFor(func() error {
		for _, v := range f.frontendStatus().GetVips() {
			not := v.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
			if slices.Contains(vips, v.GetVip()) && (!not || v.GetReason().String() != full || len(v.GetGateways()) > 0) {
				return fmt.Errorf("the status of the frontend is %v", v)
			}
		}
		for _, v := range f.lbStatus().GetVips() {
			if slices.Contains(vips, v.GetVip()) && v.GetReported().GetReason().String() != full {
				return fmt.Errorf("the status of lb is %v", v)
			}
		}
		return nil
	})
	const ofLB = "vipgate_lb_frontend_advertised_vips"
	f.waitFor(func() error {
		if n := metric(f.t, f.get(lab.LBMetrics, "/metrics"), ofLB); n != float64(4-len(vips)) {
			return fmt.Errorf("%s is %v", ofLB, n)
		}
		return nil
	})
	page := f.get(lab.FrontendMetrics, "/metrics")
	for _, v := range vips {
		if line := fmt.Sprintf("reason=%q,vip=%q} 1", reason, v); !strings.Contains(page, line) {
			f.t.Errorf("the metrics have no %s", line)
		}
	}
	out, status := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if want := fmt.Sprintf("\n%d of 4 VIPs advertised\n", 4-len(vips)); status != 1 || !strings.Contains(out, want) {
		f.t.Errorf("frontend status exits with %d and does not print %q:\n%s", status, want, out)
	}
}

// Another process listens on BIRD's loopback port before the start, and closes it later.
func TestLoopbackPortTaken(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	taken, err := f.Pod.Listen("tcp", loopbackBIRD)
	f.must(err)
	defer taken.Close()
	f.startPod()
	f.wantHealth(lab.FrontendHealth, "Egress", healthServing)
	f.waitFrontend("Announcer", false, "BIRD cannot listen on "+loopbackBIRD, fmt.Sprintf("process %d (", os.Getpid()),
		"--lb-bgp-port")
	f.wantNotAdvertised("not_accepted", every()...)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthNotServing)
	f.wantHealth(lab.FrontendHealth, "Started", healthNotServing)
	f.wantHealth(lab.FrontendHealth, "Advertised", healthNotServing)

	f.must(taken.Close())
	f.wantRoutes(every()...)
	f.wantHealth(lab.FrontendHealth, "Announcer", healthServing)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
}

// A firewall drops the loopback session at run time: the VIPs are withdrawn and reported as not
// advertised. A session that recovers within one reconnect interval changes nothing.
func TestLoopbackDropped(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2, lab.BIRDTimer)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	readiness := f.recordHealth("Readiness")
	readiness.wait(healthServing)

	_, err := f.Pod.Run(t.Context(), "ss", "-K", "dst", "127.0.0.1", "dport", "=", "1790")
	f.must(err)
	f.wantRoutes(every()...)
	f.waitFor(func() error {
		if n := metric(t, f.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_announcer_sessions_total"); n != 2 {
			return fmt.Errorf("%v sessions with BIRD", n)
		}
		return nil
	})
	readiness.wantOnly(healthServing)
	out, _ := f.run("frontend", "events", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if strings.Contains(out, "not accepted") {
		t.Errorf("a reconnect withdrew VIPs:\n%s", out)
	}

	_, err = f.Pod.Run(t.Context(), "nft", "add table ip test;"+
		"add chain ip test in { type filter hook input priority 0; };"+
		"add rule ip test in tcp dport 1790 drop")
	f.must(err)
	f.wantRoutes()
	f.wantNotAdvertised("not_accepted", every()...)
	f.waitFrontend("Announcer", false, loopbackBIRD, "nft list ruleset")
	f.wantHealth(lab.FrontendHealth, "Readiness", healthNotServing)
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)

	_, err = f.Pod.Run(t.Context(), "nft", "delete table ip test")
	f.must(err)
	f.wantRoutes(every()...)
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)
}

// Another process has BIRD export fewer VIPs to a gateway: a VIP that no gateway receives is not
// reported as advertised, the remaining VIPs are.
func TestExportRejected(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2)
	f.wantHealth(lab.FrontendHealth, "vip/"+vipA4, healthServing)
	inForce, err := os.ReadFile(f.birdConf())
	f.must(err)
	const filter = `if proto != "LB" then reject;`
	if !strings.Contains(string(inForce), filter) {
		t.Fatalf("BIRD's configuration has no filter %q", filter)
	}
	other := filepath.Join(f.Dir, "other.conf")
	rejecting := strings.ReplaceAll(string(inForce), filter, filter+" if net = "+vipA4+" then reject;")
	f.must(os.WriteFile(other, []byte(rejecting), 0o600))
	configure := func(path string) {
		_, err := f.Pod.Run(t.Context(), "birdc", "-s", f.pod.BirdSocket(), fmt.Sprintf("configure %q", path))
		f.must(err)
	}
	configure(other)
	f.wantRoutes(vipA6, vipB4, vipB6)
	f.wantNotAdvertised("not_exported", vipA4)
	out, _ := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	harness.WantText(t, out, "1 of 2", "gateway gateway-a4: receives 1 of 2 VIPs", "not exported by the speaker")
	for _, v := range f.frontendStatus().GetVips() {
		if got := strings.Join(v.GetGateways(), " "); v.GetVip() == vipB4 && got != "gateway-a4" {
			t.Errorf("gateways of %s are %q", vipB4, got)
		}
	}
	page := f.get(lab.FrontendMetrics, "/metrics")
	for name, want := range map[string]float64{"exported": 1, "expected": 2} {
		series := fmt.Sprintf(`vipgate_frontend_gateway_%s_routes{family="ipv4",gateway="gateway-a4"}`, name)
		if got := metric(t, page, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	f.waitFor(func() error {
		event := regexp.MustCompile(`(?m)^.*\b` + regexp.QuoteMeta(vipA4) + `\b.*not exported by the speaker.*$`)
		if out, _ := f.run("frontend", "events", "--admin-socket=unix://"+f.pod.FrontendAdmin()); !event.MatchString(out) {
			return fmt.Errorf("no event of %s:\n%s", vipA4, out)
		}
		return nil
	})
	// lb keeps forwarding: the gateway may receive the VIP at any time.
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)

	configure(f.birdConf())
	f.wantRoutes(every()...)
	f.wantHealth(lab.FrontendHealth, "vip/"+vipA4, healthServing)
}

// A pod whose BIRD exports nothing from the start never becomes ready: Kubernetes would delete the
// pod that it replaces.
func TestStartWithoutExports(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	executable := f.path("rejecting-bird")
	f.must(os.WriteFile(executable, fmt.Appendf(nil, `#!/bin/sh
for file; do
	test -f "$file" && sed -i 's/if proto != "LB" then reject;/reject;/' "$file"
done
exec %s "$@"
`, lab.BIRD()), 0o700))
	f.startPod("--bird-executable=" + executable)
	f.wantNotAdvertised("not_exported", every()...)
	f.wantRoutes()
	f.waitFrontend("Started", false, "not_exported") // Started never resets
	f.wantHealth(lab.FrontendHealth, "Readiness", healthNotServing)
}

// Without TCP-MD5 in the kernel the loopback session is not signed, and VIPs are advertised.
func TestKernelWithoutMD5(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	self, err := os.Executable()
	f.must(err)
	f.must(f.pod.StartLB())
	f.startFrontendAs([]string{withoutMD5 + "=1"}, append([]string{self}, f.pod.FrontendArgs()...))
	f.wantRoutes(vipA4, vipA6)
	f.waitLog(f.pod.Frontend, "kernel has no TCP-MD5")
	f.waitFrontend("Announcer", true)
	if conf, err := os.ReadFile(f.birdConf()); err != nil || strings.Contains(string(conf), "password") {
		t.Errorf("BIRD's configuration has a password, %v:\n%s", err, conf)
	}
}

// withoutMD5 makes the test binary execute its arguments as on a kernel without TCP-MD5.
const withoutMD5 = "VIPGATE_TEST_WITHOUT_MD5"

// executeWithoutMD5 executes the arguments with a seccomp filter that rejects TCP_MD5SIG like a
// kernel without it. It only returns on an error.
func executeWithoutMD5() error {
	const tcpMD5SigExt = 38 // linux/tcp.h
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	equal := func(value uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jt: yes, Jf: no}
	}
	result := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	// struct seccomp_data of linux/seccomp.h: nr, arch, instruction pointer, arguments of 64 bits.
	filter := []unix.SockFilter{
		load(0), equal(unix.SYS_SETSOCKOPT, 0, 6),
		load(24), equal(unix.IPPROTO_TCP, 0, 4),
		load(32), equal(unix.TCP_MD5SIG, 1, 0), equal(tcpMD5SigExt, 0, 1),
		result(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOPROTOOPT)),
		result(unix.SECCOMP_RET_ALLOW),
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("failed to set no_new_privs: %w", err)
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("failed to install the seccomp filter: %w", errno)
	}
	if err := os.Unsetenv(withoutMD5); err != nil {
		return err
	}
	return syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
}
