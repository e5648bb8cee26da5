package main

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// TestReplay runs incidents in which the gate, the repair of kernel state, and a DNS check decide.
func TestReplay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("network namespaces need root: run as root")
	}
	programs, err := lab.Programs()
	harness.Must(t, err)
	const logs = "../../.cache/replay"
	harness.Must(t, os.MkdirAll(logs, 0o755))
	o := options{binaries: programs, interval: 20 * time.Millisecond, observed: time.Second, keep: logs}
	for _, id := range []string{"I8", "I11", "I13"} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			all := scenarios()
			s := all[slices.IndexFunc(all, func(s scenario) bool { return s.ID == id })]
			r := o.replay(t.Context(), &s, false)
			switch {
			case r.within(s.Budget):
			case r.Err == "" && r.Late >= excuse:
				lab.Skip(t, "a machine that is not overloaded")
			default:
				t.Errorf("black hole %v, dark %v: %s; logs in %s", r.Worst.BlackHole, r.Worst.Dark, r.Err, logs)
			}
		})
	}
}
