package kernel

import (
	"context"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	childEnv = "VIPGATE_KERNEL_TEST_CHILD"
)

func childMain() {}

func TestTryout(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	v := vips("20.0.0.1/32", "20.0.0.2/32", "20.0.0.0/24", "2000::1/128", "2000::2/128", "20.0.1.0/32", "248.0.0.0/5")
	r.Configure(v)
	r.waitConfirmed(t, v...)
	t.Log(run(t, ns, "ip rule; ip -6 rule; ip route show table 4097; ip -6 route show table 4097; nft list ruleset"))
	v = vips("20.0.0.1/32", "2000::1/128")
	r.Configure(v)
	r.waitConfirmed(t, v...)
	t.Log(run(t, ns, "nft list ruleset"))
	many := manyVIPs(10000)
	begin := time.Now()
	r.Configure(many)
	r.waitConfirmed(t, many...)
	t.Log(time.Since(begin))
	r.stop()
	must(t, ns.Do(func() error { return Cleanup(context.Background(), testOptions(t)) }))
	t.Log(run(t, ns, "ip rule; ip -6 rule; ip route show table all; ip -6 route show table all; nft list ruleset"))
}
