package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// connect returns a connection in a new namespace, and runs commands there.
func connect(t *testing.T) (conn *Conn, run func(string) string) {
	ns := lab.NewNetNS(t)
	harness.Must(t, ns.Do(func() (err error) { conn, err = Dial(); return err }))
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	return conn, func(command string) string {
		t.Helper()
		out, err := ns.Run(t.Context(), "sh", "-ec", command)
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		return out
	}
}

func example() Table {
	table := Table{Family: unix.NFPROTO_INET, Name: "example"}
	nets, flows := AddressSet("nets", vip.IPv4, unix.NFT_SET_INTERVAL), AddressSet("flows", vip.IPv6, 0)
	for _, prefix := range []string{"10.0.0.0/25", "10.0.0.128/25", "255.255.255.0/24"} {
		nets.Elements = append(nets.Elements, RangeOf(netip.MustParsePrefix(prefix)).Elements()...)
	}
	flows.Volatile = true
	table.Sets = []Set{nets, flows}
	table.Chains = []Chain{{
		Name: "output", Type: "filter", Hook: unix.NF_INET_LOCAL_OUT, Priority: 10, Policy: PolicyAccept,
		Rules: []Rule{
			NewRule(table.Family, "comment",
				&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.NFPROTO_IPV4}},
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
				&expr.Lookup{SourceRegister: 1, SetName: "nets"}, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}),
			NewRule(table.Family, "", &expr.Verdict{Kind: expr.VerdictGoto, Chain: "one"}),
		},
	}, {Name: "unhooked"}, {Name: "one"}, {Name: "two"}}
	return table
}

// A table is created once, each difference is found and repaired, and volatile elements remain.
func TestEnsure(t *testing.T) {
	conn, run := connect(t)
	if difference, _, err := conn.Ensure(example()); err != nil || difference != "table inet example" {
		t.Fatalf("%q, %v", difference, err)
	}
	run("nft add element inet example flows '{ 2000::1 }'")
	// Recreated objects have other positions.
	listing := func() string { return run("nft list ruleset | sort") }
	want := listing()
	const (
		table, chain = "table inet example", "chain inet example output"
		rules, nets  = "rules of " + chain, "elements of set inet example nets"
	)
	for _, step := range []struct{ damage, found string }{
		{"true", ""},
		{"nft flush chain inet example output", rules},
		{"nft insert rule inet example output accept", rules},
		{
			"nft replace rule inet example output handle $(nft -a list chain inet example output | " +
				"sed -n 's/.*goto one # handle //p') goto two", rules,
		},
		{"nft 'chain inet example output { policy drop; }'", chain},
		{"nft 'flush chain inet example output; delete chain inet example output'", chain},
		{"nft delete chain inet example unhooked", "chain inet example unhooked"},
		{"nft delete element inet example nets '{ 10.0.0.128/25 }'", nets},
		{"nft add element inet example nets '{ 11.0.0.0/8 }'", nets},
		{"nft 'flush chain inet example output; delete set inet example nets'", rules},
		{"nft 'add table inet example { flags dormant; }'", table + " without flags 0x1"},
		{"nft add set inet example foreign '{ type mark; }'", table + " without foreign objects"},
		{
			"nft 'delete chain inet example unhooked; chain inet example unhooked { type filter hook input priority 0; }'",
			"chain inet example unhooked",
		},
	} {
		damage, found := step.damage, step.found
		run(damage)
		before := conn.Transactions
		if difference, generation, err := conn.Ensure(example()); err != nil || difference != found {
			t.Errorf("%s: %q, %v, want %q", damage, difference, err, found)
		} else if now, err := conn.Generation(); err != nil || now != generation {
			t.Errorf("%s: generation %d, want %d, %v", damage, generation, now, err)
		}
		if written := conn.Transactions - before; written > 1 || (written == 1) != (found != "") {
			t.Errorf("%s: %d transactions", damage, written)
		}
		if got := listing(); got != want {
			t.Errorf("%s: got %s\nwant %s", damage, got, want)
		}
	}
}

// connectTwice returns connections of two processes in a new namespace.
func connectTwice(t *testing.T) (conn, writer *Conn) {
	ns := lab.NewNetNS(t)
	harness.Must(t, ns.Do(func() (err error) {
		if conn, err = Dial(); err == nil {
			writer, err = Dial()
		}
		return err
	}))
	t.Cleanup(func() { harness.Must(t, errors.Join(conn.Close(), writer.Close())) })
	return conn, writer
}

// A transaction of another process during the read is not an error: the tables are read again.
func TestEnsureReadsAgain(t *testing.T) {
	conn, writer := connectTwice(t)
	table, other := example(), Table{Family: unix.NFPROTO_INET, Name: "other"}
	for i := range 3000 { // the list takes several messages
		table.Chains = append(table.Chains, Chain{Name: fmt.Sprint("chain", i)})
	}
	if _, _, err := conn.Ensure(table); err != nil {
		t.Fatal(err)
	}
	for round := range 50 {
		done := make(chan error)
		go func() {
			transaction := Transaction{Table: other}
			if transaction.AddTable(); round%2 == 1 {
				transaction.DeleteTable()
			}
			done <- writer.Commit(&transaction, nil)
		}()
		if difference, _, err := conn.Ensure(table); difference != "" || err != nil {
			t.Errorf("%q, %v", difference, err)
		}
		harness.Must(t, <-done)
	}
}

// Rules are listed although another process changes its own table without a pause.
func TestRulesDuringTransactions(t *testing.T) {
	conn, writer := connectTwice(t)
	table, other := example(), Table{Family: unix.NFPROTO_INET, Name: "other"}
	rules := &table.Chains[0].Rules
	for i := range 20_000 {
		*rules = append(*rules, NewRule(table.Family, fmt.Sprint(i), &expr.Counter{}))
	}
	transaction := Transaction{Table: other}
	transaction.AddTable()
	transaction.Replace(table, nil)
	harness.Must(t, conn.Commit(&transaction, nil))
	end, done := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for round := 0; err == nil; round++ {
			select {
			case <-end:
				done <- nil
				return
			default:
			}
			transaction := Transaction{Table: other}
			if transaction.AddTable(); round%2 == 1 {
				transaction.DeleteTable()
			}
			err = writer.Commit(&transaction, nil)
		}
		done <- err
	}()
	for range 3 {
		list, err := conn.Rules(table, "")
		if err != nil || !slices.EqualFunc(list["output"], *rules, Rule.Same) {
			t.Errorf("%d rules of %d, %v", len(list["output"]), len(*rules), err)
		}
	}
	close(end)
	harness.Must(t, <-done)
}

// The kernel rejects a transaction that names an older generation, and an error names its object.
func TestCommitErrors(t *testing.T) {
	conn, run := connect(t)
	generation, err := conn.Generation()
	harness.Must(t, err)
	run("nft add table inet other")
	transaction := Transaction{Table: Table{Family: unix.NFPROTO_INET, Name: "example"}}
	transaction.AddTable()
	if err := conn.Commit(&transaction, &generation); !errors.Is(err, unix.ERESTART) {
		t.Errorf("older generation: %v", err)
	}
	transaction.AddElements("missing", []Element{{Key: []byte{1}}})
	err = conn.Commit(&transaction, nil)
	rejected, ok := errors.AsType[*Error](err)
	if !ok || rejected.Object != "inet example missing" || !errors.Is(err, unix.ENOENT) {
		t.Errorf("missing set: %v", err)
	}
	if out := run("nft list tables"); out != "table inet other\n" {
		t.Errorf("a rejected transaction left %s", out)
	}
}
