package replypath

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/crash"
	"github.com/vipgate/vipgate/test/harness"
)

// victimPool is the environment variable with which the test binary is a process that installs the
// state for a pool, or is killed at a step.
const victimPool = "VIPGATE_VICTIM"

func runVictim(prefixes string) error {
	afterStep = crash.After
	if prefixes == "cleanup" {
		_, err := Cleanup(context.Background())
		return err
	}
	_, err := Install(context.Background(), Options{
		Pool: pool(strings.Fields(prefixes)...), Interface: link, Log: slog.Default(),
	})
	return err
}

// victim runs a victim in the target and reports whether it was killed.
func (x *fixture) victim(prefixes, step string) bool {
	x.Helper()
	ctx := harness.Context(x, await.Timeout)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), crash.Variable+"="+step, victimPool+"="+prefixes)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	x.must(x.target.Start(cmd))
	err := cmd.Wait()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL && ctx.Err() == nil {
		return true
	}
	if err != nil {
		x.Fatalf("%v: %s", err, out.String())
	}
	return false
}

// A process that is killed at any step leaves state that forwards or is silent, and flows of
// prefixes that stay; the next start completes it.
func TestKillAtAnyStep(t *testing.T) {
	x := newFixture(t, 1)
	x.serve("80")
	const first, second = "20.0.0.0/24 20.1.0.0/24 2000::/64", "20.0.0.0/24 20.2.0.0/16 2000::/64 2002::/64"
	x.must(x.target.Sysctl("net.ipv4.conf."+link+".rp_filter", "1"))
	ask := "ip route replace 20.1.0.1 dev int0; ip route replace 20.0.0.1 dev int0"
	x.sh(x.pods[0], "sysctl -qw net.ipv4.neigh.int0.mcast_solicit=1 net.ipv4.neigh.int0.retrans_time_ms=50")
	silent := func(step string) {
		t.Helper()
		x.sh(x.pods[0], ask)
		for _, a := range []string{"20.0.0.1", "20.1.0.1"} {
			c, err := x.dial(x.pods[0], "udp", "", a+":80")
			x.must(err)
			_, _ = c.Write([]byte("x"))
			await.True(t, "end of ARP for "+a, func() bool {
				return strings.Contains(x.sh(x.pods[0], "ip neigh show "+a), "FAILED") || x.resolved(a)
			})
			if x.resolved(a) {
				t.Errorf("%s: ARP for %s was answered", step, a)
			}
			x.must(c.Close())
		}
		x.sh(x.pods[0], "ip route del 20.0.0.1; ip route del 20.1.0.1; ip neigh flush all")
	}
	steps := []string{stepRead, stepRuleset, stepReply, stepAccept, stepStale, stepPool}
	x.victim(second, "")
	want := withoutLive(x.state())
	x.victim("cleanup", "")
	if left := x.state(); strings.TrimSpace(left) != "" {
		t.Fatalf("cleanup left %s", left)
	}
	for _, step := range steps {
		// Start without state.
		if !x.victim(first, step) {
			t.Fatalf("not killed at %s", step)
		}
		silent(step)
		x.victim(first, "")
		flows := []*flow{x.open("tcp", "20.0.0.1:80"), x.open("tcp", "[2000::1]:80")}
		// Change to a different pool.
		if !x.victim(second, step) {
			t.Fatalf("not killed at %s", step)
		}
		for _, f := range flows {
			f.mustEcho(100)
		}
		silent(step)
		x.victim(second, "")
		for _, f := range flows {
			f.mustEcho(100)
		}
		if diff := cmp.Diff(want, withoutLive(x.state())); diff != "" {
			t.Errorf("killed at %s: %s", step, diff)
		}
		x.victim("cleanup", "")
	}
}

// withoutLive removes the live peers from a state.
func withoutLive(state string) string {
	return strings.Join(slices.DeleteFunc(strings.SplitAfter(state, "\n"), func(line string) bool {
		return strings.Contains(line, " : 0x") || strings.Contains(line, "elements = { 0x")
	}), "")
}

// resolved reports whether the pod has a neighbor entry with a link-layer address for an address.
func (x *fixture) resolved(a string) bool {
	return strings.Contains(x.sh(x.pods[0], "ip neigh show "+a), "lladdr")
}
