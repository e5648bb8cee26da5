package readiness

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/vip"
)

// TestNameTableMatchesSets stages random revisions and compares the table with plain sets.
func TestNameTableMatchesSets(t *testing.T) {
	spellings := []string{"20.0.0.1/32", "20.0.0.2/32", "2000::1/128", "2000:0::1/128", "2000:0:0::1/128", "2000::2/128"}
	rapid.Check(t, func(r *rapid.T) {
		var table nameTable
		state := vip.Set{}
		for revision := range uint64(rapid.IntRange(1, 20).Draw(r, "revisions")) {
			snapshot := revision == 0 || rapid.IntRange(0, 4).Draw(r, "snapshot") == 0
			table.begin(revision, snapshot)
			if snapshot {
				state = vip.Set{}
			}
			named := vip.Set{}
			for range rapid.IntRange(0, 8).Draw(r, "names") {
				text := rapid.SampledFrom(spellings).Draw(r, "name")
				removed := !snapshot && rapid.Bool().Draw(r, "removed")
				v, err := table.name(text, removed)
				want := vip.Require(text)
				if v != want || (err != nil) != named.Has(want) {
					r.Fatalf("%s is %v, %v; named: %v", text, v, err, named)
				}
				if err != nil {
					continue
				}
				named[want] = struct{}{}
				if delete(state, want); !removed {
					state[want] = struct{}{}
				}
			}
			table.compact()
			if table.live != len(state) || table.size() > len(spellings) {
				r.Fatalf("%d VIPs and %d names, want %v", table.live, table.size(), state)
			}
		}
	})
}

func TestNameTableForgetsRemovedVIPs(t *testing.T) {
	var table nameTable
	table.begin(1, true)
	if _, err := table.name("2001::/64", false); err != nil {
		t.Fatal(err)
	}
	for revision := range uint64(100) {
		for _, removed := range []bool{false, true} {
			table.begin(revision, false)
			for i := range 1000 {
				if _, err := table.name(fmt.Sprintf("2000:%x::%x/128", revision, i), removed); err != nil {
					t.Fatal(err)
				}
			}
			table.compact()
		}
		if table.live != 1 || table.size() > nameSlack+2 || len(table.index) != table.size() {
			t.Fatalf("%d VIPs, %d names", table.live, table.size())
		}
	}
	table.begin(1000, false)
	if _, err := table.name("2001::/64", true); err != nil || table.live != 0 {
		t.Fatalf("the VIP that stayed: %d live, %v", table.live, err)
	}
}

func TestLiveVIPLimit(t *testing.T) {
	var d decoder
	names := func(part int) (texts []string) {
		for i := range MaxVIPs / 2 {
			texts = append(texts, fmt.Sprintf("2000:%x::%x:%x/128", part, i>>16, i&0xffff))
		}
		return texts
	}
	for part := range 2 {
		m := message(uint64(part+1), deltaOf(true, names(part)...))
		if part == 0 {
			m = message(1, snapshotOf(true, names(0)...))
		}
		if _, err := d.decode(m, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	replaced := message(3, deltaOf(true, "20.0.0.1/32"), removing(names(0)[:1]...))
	if _, err := d.decode(replaced, time.Now()); err != nil {
		t.Fatalf("one VIP instead of another: %v", err)
	}
	_, err := d.decode(message(4, deltaOf(true, "20.0.0.2/32")), time.Now())
	if err == nil || !strings.Contains(err.Error(), "sent more than 200000 VIPs") {
		t.Fatalf("error %v", err)
	}
}
