package fwstate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// The kernel dumps many rules in several datagrams and resumes at a count. If another process
// deletes an earlier rule, the kernel skips a rule, which would then be reported as drift.
func TestRuleListIsCompleteDuringDeletions(t *testing.T) {
	const rules = 1500
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	var batch strings.Builder
	for n := 5000; n < 5000+rules; n++ {
		fmt.Fprintf(&batch, "rule add fwmark %d/0xffffff lookup %d priority 91 protocol 179\n", n, n)
	}
	ns.Shell(t, "ip -batch - <<'EOF'\n"+batch.String()+"EOF")

	var others strings.Builder
	for range 200 {
		others.WriteString("rule add fwmark 1 lookup 77 priority 5\nrule del priority 5\n")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		for ctx.Err() == nil {
			if _, err := ns.Run(ctx, "sh", "-c", "ip -batch - <<'EOF'\n"+others.String()+"EOF"); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	defer done.Wait()
	defer cancel()
	for lists, end := 0, time.Now().Add(patience); lists < 50; {
		if time.Now().After(end) {
			t.Fatalf("only %d lists could be had", lists)
		}
		list, err := f.rt.Rules(vip.IPv4)
		if errors.Is(err, nlmsg.ErrInterrupted) {
			continue // retried later and not drift
		}
		must(t, err)
		n := 0
		for _, r := range list {
			if r == f.targetPolicyRule(RouteKey{r.Table, vip.IPv4}) {
				n++
			}
		}
		if lists++; n != rules {
			t.Fatalf("list %d has %d rules of %d", lists, n, rules)
		}
	}
}
