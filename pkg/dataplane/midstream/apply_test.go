package midstream

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// streams returns one stream of both families in which two of seven slots have earlier targets.
func streams() (all Streams) {
	link, addresses := plan.LinkAddress{2, 0, 0, 0, 0, 1}, []string{"172.16.1.1", "fd00:16::1"}
	for _, family := range vip.Families {
		address := netip.MustParseAddr(addresses[family])
		all[family] = []Stream{{
			Name: "stream-a", Size: 7, Seed: 1, FWMarks: map[uint32]plan.LinkAddress{5000: link, 5001: {}},
			Asked: [copies]map[uint32]netip.Addr{{3: address, 5: address}, {5: address.Next()}},
		}}
	}
	return all
}

// Apply installs both tables, repairs a change of another process, and removes them.
func TestApply(t *testing.T) {
	ns := lab.NewNetNS(t)
	var conn *nft.Conn
	harness.Must(t, ns.Do(func() (err error) {
		conn, err = nft.Dial()
		return err
	}))
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	apply := func(want string, streams Streams) {
		t.Helper()
		difference, err := Apply(conn, 0xffffff, streams, Streams{})
		if err != nil || difference != want {
			t.Fatalf("Apply returned %q, %v; want %q", difference, err, want)
		}
	}
	apply("table ip vipgate-lb", streams())
	apply("", streams())
	// nft must be able to list the rules that it did not write.
	for _, family := range []string{"ip", "ip6"} {
		out, err := ns.Run(t.Context(), "nft", "list", "table", family, "vipgate-lb")
		if err != nil || !strings.Contains(out, "dup to") {
			t.Fatalf("%v:\n%s", err, out)
		}
		t.Log(out)
	}
	for change, difference := range map[string]string{
		"flush chain ip vipgate-lb denied":                           "rules of chain ip vipgate-lb denied",
		"delete element ip vipgate-lb asked-1/stream-a { 3 }":        "elements of map ip vipgate-lb asked-1/stream-a",
		"delete element ip6 vipgate-lb link/stream-a { 2:0:0:0:0:1}": "elements of set ip6 vipgate-lb link/stream-a",
		"delete table ip6 vipgate-lb":                                "table ip6 vipgate-lb",
	} {
		ns.Shell(t, "nft '"+change+"'")
		apply(difference, streams())
		apply("", streams())
	}
	// A change of the streams replaces their objects, and leaves undecided flows alone.
	ns.Shell(t, "nft add element ip vipgate-lb undecided '{ 1.2.3.4 . 20.0.0.1 . 1000 . 5000 }'")
	changed := streams()
	changed[vip.IPv4][0].Name = "stream-b"
	apply("chain ip vipgate-lb stream/stream-b", changed)
	if out := ns.Shell(t, "nft list set ip vipgate-lb undecided"); !strings.Contains(out, "1.2.3.4") {
		t.Error(out)
	}
	if counters, err := Read(conn); err != nil || counters != (Counters{}) {
		t.Errorf("%+v, %v", counters, err)
	}
	apply("table without streams", Streams{})
	if out := ns.Shell(t, "nft list ruleset"); out != "" {
		t.Error(out)
	}
}
