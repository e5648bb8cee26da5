package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// With Meridio's load balancer a rise never waits, since all VIPs share one state; a VIP of lb
// waits from its second flap within a minute (docs/meridio.md#what-changes).
func TestFlapsBesideMeridioLB(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio("VIPGATE_LOG_LEVEL=debug") // logs each decision
	for flap := range 5 {
		mark := m.mark()
		m.switchOldLB(false)
		m.wantRoutes()
		available := time.Now()
		m.switchOldLB(true)
		m.wantRoutes(every()...)
		var last time.Duration
		for _, v := range every() {
			last = max(last, m.waitUpdate(mark, v, announced).At.Sub(available))
			m.wantUpdates(mark, v, withdrawn, announced)
		}
		t.Logf("flap %d: every VIP announced after %v", flap+1, last)
	}
	if out := m.pod.Frontend.Output(); strings.Contains(out, "flapping") {
		t.Errorf("a rise waited:\n%s", out)
	}
}

// kernelState returns rules, blackhole routes, the gateways' routes and nftables of the pod.
func (m *meridio) kernelState() string {
	m.t.Helper()
	var all strings.Builder
	for _, command := range []string{
		"ip -4 rule show", "ip -6 rule show", "ip -4 route show table 4096", "ip -6 route show table 4096",
		"ip -4 route show table all type blackhole", "ip -6 route show table all type blackhole", "nft list ruleset",
	} {
		words := strings.Fields(command)
		out, err := m.Pod.Run(m.t.Context(), words[0], words[1:]...)
		if err != nil && !strings.Contains(out+err.Error(), "FIB table does not exist") {
			m.t.Fatal(err)
		}
		// A table exists from its first route on, also when it is empty again.
		if out = strings.TrimSpace(out); err == nil && out != "" {
			fmt.Fprintf(&all, "%s:\n%s\n", command, out)
		}
	}
	return all.String()
}

// With --remove-rules-on-exit the frontend leaves no state to Meridio's frontend, which replaces
// it in the pod; without the flag the rules still catch VIP traffic until the next start, and
// `frontend cleanup` removes the rest (docs/meridio.md#swap-check-go-back).
func TestExchangeForMeridioFrontend(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	before := m.kernelState()
	m.startMeridio("VIPGATE_REMOVE_RULES_ON_EXIT=true")
	m.wantRules(true)
	m.stopFrontend()
	if after := m.kernelState(); after != before {
		t.Errorf("the frontend has left\n%s\nbefore it was\n%s", after, before)
	}

	m.startFrontend()
	m.wantRoutes(every()...)
	m.stopFrontend()
	m.wantRules(true)
	if out, status := m.run("frontend", "cleanup"); status != 0 {
		t.Errorf("frontend cleanup ended with %d: %s", status, out)
	}
	if after := m.kernelState(); after != before {
		t.Errorf("the cleanup has left\n%s\nbefore it was\n%s", after, before)
	}
	m.stop(m.pod.LB)
}
