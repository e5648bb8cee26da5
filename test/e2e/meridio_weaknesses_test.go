package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// weaknesses lists the weaknesses of Meridio's frontend 1.2.8, each with the tests that fail if it
// is reproduced; the name of a test in another directory is prefixed by that directory.
func weaknesses() map[string][]string {
	return map[string][]string{
		"all-or-nothing gating":        {"TestVIPsAreGatedIndependently", "TestOldLBIsUpgraded"},
		"families coupled":             {"TestFamiliesAreIndependent", "TestNSPRegistration"},
		"LB crash never withdraws":     {"TestOldLBGatesVIPs", "TestLBCrashWithdrawsEveryVIP"},
		"LB freeze never withdraws":    {"TestOldLBGatesVIPs", "TestHungMeridioLBWithdraws", "TestLBPausedUntilLeaseExpires"},
		"birdc without deadline":       {"TestBIRDRestart", "TestFrontendTermWithHungBIRD", "pkg/bird TestCommandDeadline"},
		"scrape blocks withdraw":       {"TestScrapesDelayNoWithdrawal", "pkg/metrics TestHungScrapeIsClosed"},
		"already queued ends process":  {"TestReconfigurationBurst"},
		"configuration in place":       {"TestBIRDConfigurationIsReplaced", "TestUnappliedBIRDConfiguration"},
		"polling each second":          {"TestSessionLossIsNotPolled"},
		"NSP call before a withdraw":   {"TestHungNSPDelaysNoWithdrawal"},
		"debounce of Secrets starves":  {"pkg/meridio/secret TestEventStorm"},
		"unanchored BFD parser":        {"pkg/bird TestBFDIsMatchedByWholeAddress"},
		"VIP without a prefix length":  {"TestVIPWithoutPrefixLength", "TestNSPAttractorChanges"},
		"stale rules after a crash":    {"TestCrashLeavesNoStaleRules", "pkg/kernel TestMeridioRulesAreRemoved"},
		"empty attractor list ignored": {"TestNSPAttractorChanges"},
		"password with a quote":        {"TestGatewayWithPassword"},
		"BIRD's exit 0 unnoticed":      {"TestBIRDRestart"},
		"egress leaks without BIRD":    {"TestEgressDoesNotLeakWithoutBIRD", "pkg/kernel TestNoLeakAcrossRestart"},
		"SPIRE absent blocks SIGTERM":  {"TestNSPAbsence", "TestWorkloadAPIOutage"},
		"restart with NSP absent":      {"TestNSPAbsence"},
	}
}

// Each test that covers a weakness exists.
func TestWeaknessesAreCovered(t *testing.T) {
	t.Parallel()
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	known := map[string][]string{}
	for weakness, tests := range weaknesses() {
		for _, name := range tests {
			dir := "test/e2e"
			if d, n, found := strings.Cut(name, " "); found {
				dir, name = d, n
			}
			if known[dir] == nil {
				files, err := filepath.Glob("../../" + dir + "/*_test.go")
				harness.Must(t, err)
				for _, file := range files {
					text, err := os.ReadFile(file)
					harness.Must(t, err)
					for _, m := range declared.FindAllStringSubmatch(string(text), -1) {
						known[dir] = append(known[dir], m[1])
					}
				}
			}
			if !slices.Contains(known[dir], name) {
				t.Errorf("%s: %s has no %s", weakness, dir, name)
			}
		}
	}
}

// Scrapes, and clients that request metrics and never read them, do not delay a withdrawal.
func TestScrapesDelayNoWithdrawal(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	for range 20 {
		c, err := f.dialPod(t.Context(), "tcp", lab.FrontendMetrics)
		f.must(err)
		defer c.Close()
		_, err = io.WriteString(c, strings.Repeat("GET /metrics HTTP/1.1\r\nHost: pod\r\n\r\n", 50))
		f.must(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	scraped := make(chan int, 1)
	go func() {
		n := 0
		for ctx.Err() == nil {
			c, err := f.dialPod(ctx, "tcp", lab.FrontendMetrics)
			if err != nil {
				continue
			}
			_, err = io.WriteString(c, "GET /metrics HTTP/1.0\r\n\r\n")
			if page, errRead := io.ReadAll(c); err == nil && errRead == nil && strings.Contains(string(page), "vipgate_") {
				n++
			}
			c.Close()
		}
		scraped <- n
	}()
	mark := f.mark()
	for range 3 {
		killed := time.Now()
		f.must(f.pod.LB.Kill())
		f.withdrawnAfter("killed", mark, killed, vipA4, vipA6)
		f.must(f.pod.StartLB())
		f.wantRoutes(vipA4, vipA6)
	}
	cancel()
	if n := <-scraped; n == 0 {
		t.Error("no scrape was answered")
	}
}

// Changes that arrive while BIRD loads previous ones result in the last configuration, and restart
// nothing else.
func TestReconfigurationBurst(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio()
	mark, bird, from := m.mark(), m.birdPID(), length(m.pod.Frontend)
	for i := range 40 {
		m.setAttractor(func(a *nspv1.Attractor) {
			for n := range 1 + i%5 {
				addGateway(a, fmt.Sprintf("gateway-%d", n), fmt.Sprintf("169.254.100.%d", 10+n)).HoldTime = uint32(3 + i)
			}
		})
	}
	m.nsp.SetAttractors(nspAttractor())
	m.waitFor(func() error {
		if n := len(m.frontendStatus().GetGateways()); n != 2 {
			return fmt.Errorf("%d gateways are in force", n)
		}
		return nil
	})
	m.setAttractor(func(a *nspv1.Attractor) { addVIPs(a, "20.0.0.3/32") })
	m.wantRoutes(append(every(), "20.0.0.3/32")...)
	m.waitFrontend("BIRDConfiguration", true)
	m.wantSilence(mark)
	if now := m.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
	if failed := lines(m.pod.Frontend, from, "level=ERROR"); len(failed) > 0 {
		t.Errorf("errors: %q", failed)
	}
	m.wantRunning(m.pod.Frontend)
}

// BIRD's configuration is replaced atomically: a reader of the old file reads it to its end.
func TestBIRDConfigurationIsReplaced(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.startPod()
	f.waitFrontend("Egress/ipv4", true)
	path := f.birdConf()
	old, err := os.Open(path)
	f.must(err)
	defer old.Close()
	before, err := os.ReadFile(path)
	f.must(err)
	f.must(f.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4)))
	f.waitFor(func() error {
		now, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(now), "NBR-gateway-b4") {
			return fmt.Errorf("%s does not have the new gateway", path)
		}
		return err
	})
	if now, err := io.ReadAll(old); err != nil || string(now) != string(before) {
		t.Errorf("the file was rewritten in place, error %v:\n%s", err, now)
	}
}

// The loss of a gateway session is handled when BIRD detects it, which TestLogLineTriggersPoll of
// pkg/bird proves. A poll each second would detect losses that are 1.2 s apart after 0, 0.2, 0.4 …
// seconds.
func TestSessionLossIsNotPolled(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	record := f.recordHealth("Egress/ipv4")
	record.wait(healthServing)
	next := time.Now()
	var took []time.Duration
	for range 5 {
		f.waitPast(next)
		next = time.Now().Add(1200 * time.Millisecond)
		lost := time.Now()
		f.control("disable trench0")
		record.wait(healthNotServing)
		took = append(took, time.Since(lost))
		f.control("enable trench0")
		record.wait(healthServing)
		f.waitFor(func() error { // the next loss is 1.2 s later, or a multiple of it
			for time.Until(next) < 0 {
				next = next.Add(1200 * time.Millisecond)
			}
			return nil
		})
	}
	slices.Sort(took)
	t.Logf("seen after %v", took)
}

// routing returns the rules and VIP sets that route the pod's traffic.
func (m *meridio) routing() string {
	m.t.Helper()
	var all strings.Builder
	for _, command := range []string{"ip -4 rule show", "ip -6 rule show", "nft -s list ruleset"} {
		words := strings.Fields(command)
		out, err := m.Pod.Run(m.t.Context(), words[0], words[1:]...)
		m.must(err)
		all.WriteString(out)
	}
	return all.String()
}

// A VIP without a prefix length is refused: no rule or set contains the address or a catch-all
// prefix.
func TestVIPWithoutPrefixLength(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio()
	before, from := m.routing(), length(m.pod.Frontend)
	if !strings.Contains(before, "20.0.0.1") {
		t.Fatalf("no set has the VIPs:\n%s", before)
	}
	m.setAttractor(func(a *nspv1.Attractor) { addVIPs(a, "20.0.0.9", "2000::9", "0.0.0.0/0", "::/0", "") })
	for _, v := range []string{"20.0.0.9", "2000::9", "0.0.0.0/0", "::/0"} {
		m.waitLine(m.pod.Frontend, from, "refused", "name=vip-"+v)
	}
	m.waitFrontend("Configuration", false, "vip-20.0.0.9", "20.0.0.9/32")
	if after := m.routing(); after != before {
		t.Errorf("rules and sets were\n%s\nand are\n%s", before, after)
	}
	m.wantRoutes(every()...)
}

// The restart after a crash removes the rules of VIPs and gateways that were removed in between.
func TestCrashLeavesNoStaleRules(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.setAttractor(func(a *nspv1.Attractor) { a.Vips = a.GetVips()[:2] })
	m.startOldLB()
	m.startFrontend()
	m.wantRoutes(every()[:2]...)
	before := m.routing()
	m.nsp.SetAttractors(nspAttractor())
	m.wantRoutes(every()...)
	if m.routing() == before {
		t.Fatal("more VIPs changed no set")
	}
	m.must(m.pod.Frontend.Kill())
	m.wantRoutes()
	m.setAttractor(func(a *nspv1.Attractor) { a.Vips = a.GetVips()[:2] })
	m.startFrontend()
	m.wantRoutes(every()[:2]...)
	m.waitFor(func() error {
		if now := m.routing(); now != before {
			return fmt.Errorf("rules and sets were\n%s\nand are\n%s", before, now)
		}
		return nil
	})
}

// Traffic of VIPs never leaves by the pod's primary network while BIRD is down, with or without
// the routes that BIRD left.
func TestEgressDoesNotLeakWithoutBIRD(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	// The primary network has a default route, and the VIP is an address of the pod.
	f.must(f.Pod.IP("route", "add", "default", "via", lab.Target1v4.String(), "dev", lab.Internal))
	f.must(f.Pod.IP("addr", "add", vipA4, "dev", "lo"))
	count := "add table ip leak; add chain ip leak in { type filter hook prerouting priority -300; }; " +
		"add rule ip leak in ip saddr 20.0.0.1 udp dport 9 counter"
	f.nft(count)
	_, err := f.Backend.Run(t.Context(), "nft", count)
	f.must(err)
	packets := func(ns *lab.NetNS) string {
		t.Helper()
		out, err := ns.Run(t.Context(), "nft", "list", "table", "ip", "leak")
		f.must(err)
		return regexp.MustCompile(`packets (\d+)`).FindString(out)
	}
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	f.waitTable("-4", "default")

	var c net.Conn
	f.must(f.Pod.Do(func() error {
		c, err = net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(20, 0, 0, 1)},
			&net.UDPAddr{IP: net.IPv4(198, 51, 100, 7), Port: 9})
		return err
	}))
	ctx, cancel := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	defer func() {
		cancel()
		sending.Wait()
		c.Close()
	}()
	sending.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_, _ = c.Write([]byte("leak?")) // an error is the effect of the blackhole
			case <-ctx.Done():
				return
			}
		}
	})
	for _, end := range []func(){
		func() { f.must(syscall.Kill(f.birdPID(), unix.SIGKILL)) },
		func() { // BIRD removes its routes
			_, err := f.Pod.Run(t.Context(), "birdc", "-s", f.pod.BirdSocket(), "down")
			f.must(err)
		},
	} {
		mark, through := f.mark(), packets(f.Gateway)
		f.waitFor(func() error {
			if packets(f.Gateway) == through {
				return fmt.Errorf("no packet reaches the gateway")
			}
			return nil
		})
		end()
		f.waitUpdate(mark, vipA4, announced)
		f.wantUpdates(mark, vipA4, withdrawn, announced)
	}
	if leaked := packets(f.Backend); leaked != "packets 0" {
		t.Errorf("%s of the VIP left by the primary network", leaked)
	}
}
