package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// A web server and a resolver of one target: all must pass for one stream, any for another. Each
// failing member has its sentence at the target and at the VIP, and a slow member its own interval.
func TestCheckMembers(t *testing.T) {
	t.Parallel()
	f, servers := newKindsFixture(t, 1)
	x := servers[0]
	const http, dns = `{http: {port: 80, method: POST, headers: ["X-Probe: 1"], path: /healthz, status: "200"}}`,
		`{dns: {port: 53, name: www.example.org, recursion: true, answer: '^192\.0\.2\.1$'}, fall: 2}`
	trench := strings.Replace(fmt.Sprintf(kindsTrench, lineA4, lineA6), `[30.0.0.0/28, "3000::/124"]`,
		"["+strings.Join(x.prefixes(), ", ")+"]", 1)
	// The resolver listens on 30.0.0.3 and 30.0.0.4.
	for kind, host := range map[string]int{"all": 3, "any": 4} {
		trench += fmt.Sprintf("  - name: %[1]s\n    vips: [30.0.0.%[2]d/32, \"3000::%[2]d/128\"]\n"+
			"    check: {%[1]s: [%[3]s, %[4]s], %[7]s}\n"+
			"    targets: [{name: target-1, ips: [%[5]s, \"%[6]s\"]}]\n", kind, host, http, dns,
			lab.TargetAddrs(1)[0], lab.TargetAddrs(1)[1], lab.CheckTimers)
	}
	f.must(f.WriteTrench(trench))
	x.start("good")
	f.must(f.pod.StartLB("--dataplane=nftables"))

	// want waits for the rows of a target, or of a VIP, with this state and these texts.
	want := func(step, first, second, state string, texts ...string) {
		t.Helper()
		var last string
		err := lab.Eventually(f.ctx, 10*time.Millisecond, func() (err error) {
			last, err = f.lb("status")
			for line := range strings.SplitSeq(last, "\n") {
				words := strings.Fields(line)
				if len(words) < 2 || words[0] != first || second != "" && words[1] != second ||
					!strings.Contains(line, "  "+state+"  ") {
					continue
				}
				missing := ""
				for _, text := range texts {
					if !strings.Contains(line, text) {
						missing = text
					}
				}
				if missing == "" && (len(texts) > 0 || !strings.Contains(line, "[")) {
					return nil
				}
			}
			return fmt.Errorf("no %s row of %s %s with %q (%w)", state, first, second, texts, err)
		})
		if err != nil {
			t.Fatalf("%s: %v\n%s", step, err, last)
		}
		t.Logf("%s\n%s", step, last)
	}
	const refused = "connection refused: the application does not listen on"
	end := func(nth int) { f.must(x.processes[nth].Kill()) }
	want("all is well", "all", "target-1", "ready")
	want("all is well", "any", "target-1", "ready")

	end(1) // the resolver
	want("no resolver", "all", "target-1", "not ready", "all[1].dns: port 53: ICMP port unreachable from 30.0.0.3")
	want("no resolver", "30.0.0.3/32", "", "not ready", "all[1].dns: port 53: ICMP port unreachable")
	want("no resolver", "any", "target-1", "ready", "any[1].dns: port 53: ICMP port unreachable from 30.0.0.4")
	end(0) // the web server
	want("no server", "all", "target-1", "not ready", "all[0].http: port 80: "+refused, "; all[1].dns: port 53: ICMP")
	want("no server", "any", "target-1", "not ready", "any[0].http: port 80: "+refused, "; any[1].dns: port 53: ICMP")
	want("no server", "30.0.0.4/32", "", "not ready", "any[0].http: port 80: "+refused)
	x.end()

	x.start("good")
	want("the servers are back", "all", "target-1", "ready")
	want("the servers are back", "any", "target-1", "ready")
	x.end()
	x.start("wrong")
	want("wrong answers", "all", "target-1", "not ready", "all[0].http: 30.0.0.3 port 80: status 503", "rcode SERVFAIL")
}
