package registration

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/registrytest"
)

// A name gains and loses load balancers, and fails.
func TestGroupFollowsName(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	first, _ := f.lb("127.0.0.2", 50*time.Millisecond)
	second, _ := f.lb("127.0.0.3", time.Hour)
	third, _ := f.lb("127.0.0.4", 50*time.Millisecond)
	f.dns.set("ip4", errServer)
	g := f.start("lb.test")
	g.wantReport("lb.test:" + f.port + ": lookup failed")
	g.want("") // the name, without a load balancer
	f.dns.set("ip4", nil, "127.0.0.2", "127.0.0.3")
	g.want("127.0.0.2 READY", "127.0.0.3 READY")

	for what, err := range map[string]error{"server": errServer, "no address": nil} {
		f.dns.set("ip4", err)
		f.dns.waitForLookups(t, "ip4")
		g.want("LOOKUP FAILED", "127.0.0.2 READY", "127.0.0.3 READY")
		if strings.Contains(g.text(), "deregistering") {
			t.Fatalf("%s: the target was deregistered", what)
		}
	}
	f.dns.set("ip4", nil, "127.0.0.2", "127.0.0.4")
	g.want("127.0.0.2 READY", "127.0.0.3 DRAINING", "127.0.0.4 READY")
	wantStates(t, second, healthcheck.Draining)
	f.dns.set("ip4", nil, "127.0.0.2", "127.0.0.3") // back before the end of its drain
	g.want("127.0.0.2 READY", "127.0.0.3 READY")
	wantStates(t, second, healthcheck.Ready)
	wantStates(t, third)

	close(g.leave)
	wantStates(t, first)
	wantStates(t, second, healthcheck.Draining)
	g.end() // as a second signal does
	harness.Check(t, g.wantEnd())
	wantStates(t, second, healthcheck.Draining)
}

// An answer without a load balancer has to be repeated, unless the load balancer is gone, too.
func TestGroupForgedAnswers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		answers int
		stopped bool
		leaves  bool
	}{
		"none": {}, "one": {answers: 1}, "two": {answers: goneAnswers - 1}, "three": {answers: goneAnswers, leaves: true},
		"four": {answers: goneAnswers + 1, leaves: true}, "without a registration": {answers: 1, stopped: true, leaves: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			_, stop := f.lb("127.0.0.2", 0)
			f.dns.set("ip4", nil, "127.0.0.2")
			g := f.start("lb.test")
			g.want("127.0.0.2 READY")
			if test.stopped {
				stop()
				g.want("127.0.0.2")
			}
			f.dns.mu.Lock()
			f.dns.forged = test.answers
			f.dns.mu.Unlock()
			await.True(t, "forged answers", func() bool {
				f.dns.mu.Lock()
				defer f.dns.mu.Unlock()
				return f.dns.forged == 0
			})
			f.dns.waitForLookups(t, "ip4")
			line := "127.0.0.2:" + f.port + ": no longer an address of"
			if left := strings.Contains(g.text(), line); left != test.leaves {
				t.Errorf("deregistered: %v, want %v", left, test.leaves)
			}
		})
	}
}

// A load balancer that hangs or is down does not delay the registrations at other load balancers.
func TestGroupHangingLoadBalancer(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	good, stop := f.lb("127.0.0.2", 50*time.Millisecond)
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.3", f.port)) // the kernel accepts, nothing answers
	harness.Must(t, err)
	defer l.Close()
	g := f.start("127.0.0.2", "127.0.0.3", "127.0.0.4")
	g.want("127.0.0.2 READY", "127.0.0.3", "127.0.0.4")
	g.wantFailures("127.0.0.4", 1)
	if slices.ContainsFunc(g.Status(), func(s *targetadminv1.Registration) bool {
		return strings.HasPrefix(s.GetLb(), "127.0.0.3:") && s.GetFailures() > 0
	}) {
		t.Error("the load balancer after the hanging one was called when that call had ended: one after the other")
	}
	g.wantReport("127.0.0.4:" + f.port + ": not registered, trying again: the load balancer does not answer")
	g.wantFailures("127.0.0.4", 2)

	stop()
	again, _ := f.lb("127.0.0.2", 50*time.Millisecond)
	wantStates(t, again, healthcheck.Ready)
	wantStates(t, good, healthcheck.Ready) // whose process was killed
	g.want("127.0.0.2 READY", "127.0.0.3", "127.0.0.4")

	close(g.leave)
	wantStates(t, again)
	if len(g.ended) > 0 {
		t.Error("the target was deregistered at one load balancer after the other")
	}
	if err := g.wantEnd(); err != nil {
		t.Error(err) // the hung load balancers never had a registration
	}
}

// wantFailures waits until so many attempts at a load balancer failed.
func (r *running) wantFailures(host string, n uint64) {
	r.t.Helper()
	await.True(r.t, fmt.Sprintf("%d failures of %s", n, host), func() bool {
		return slices.ContainsFunc(r.Status(), func(s *targetadminv1.Registration) bool {
			return strings.HasPrefix(s.GetLb(), host+":") && s.GetFailures() >= n
		})
	})
}

// If a load balancer is down during the deregistration, it may still have the target.
func TestGroupFailsToDeregister(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	good, _ := f.lb("127.0.0.2", 0)
	_, stop := f.lb("127.0.0.3", 0)
	g := f.start("127.0.0.2", "127.0.0.3")
	g.want("127.0.0.2 READY", "127.0.0.3 READY")
	stop()
	g.want("127.0.0.2 READY", "127.0.0.3")
	close(g.leave)
	err := g.wantEnd()
	if want := "127.0.0.3:" + f.port + ": the target could not be deregistered"; err == nil ||
		!strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "127.0.0.2") {
		t.Errorf("got %v, want %s", err, want)
	}
	wantStates(t, good)
}

// A caller with the same name takes the target over, at one load balancer after the other.
func TestGroupSuperseded(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	lbs := map[string]*registrytest.Registry{}
	for _, host := range []string{"127.0.0.2", "127.0.0.3"} {
		lbs[host], _ = f.lb(host, 0)
	}
	f.dns.set("ip4", nil, "127.0.0.2", "127.0.0.3")
	g := f.start("lb.test")
	g.want("127.0.0.2 READY", "127.0.0.3 READY")
	one := f.start("127.0.0.2")
	g.want("127.0.0.2", "127.0.0.3 READY")
	g.wantReport("127.0.0.2:" + f.port + ": another call registered a")
	f.dns.waitForLookups(t, "ip4") // must not register the target again
	one.want("127.0.0.2 READY")
	two := f.start("127.0.0.3")
	if err := g.wantEnd(); err == nil || strings.Count(err.Error(), "another call registered a") != 2 {
		t.Errorf("ended with %v", err)
	}
	close(two.leave)
	harness.Check(t, two.wantEnd())
	wantStates(t, lbs["127.0.0.2"], healthcheck.Ready)
	wantStates(t, lbs["127.0.0.3"])
}

// One load balancer gets the stream later than the rest.
func TestGroupRejected(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	late, _ := f.lb("127.0.0.2", 0)
	f.lb("127.0.0.3", 0)
	late.Configure(nil, targetset.AddressPolicy{})
	g := f.start("127.0.0.2", "127.0.0.3")
	g.want("127.0.0.2", "127.0.0.3 READY")
	g.wantReport("127.0.0.2:" + f.port + ": not registered, trying again: the trench file has no stream")
	check := trench.Check{
		SingleCheck: trench.SingleCheck{
			TCP: trench.TCPCheck{Port: 5000}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1,
		},
	}
	late.Configure([]trench.Stream{{Name: "s", Check: check}}, targetset.AddressPolicy{})
	g.want("127.0.0.2 READY", "127.0.0.3 READY")
}
