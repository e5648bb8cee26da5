package dataplane

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// A stream whose targets are all down has chain, maps and VIPs in the kernel, and
// neither rules nor routes. Without its record it would be taken for somebody else's.
func TestAStreamWithoutTargetsIsKnownAgainWithoutRecords(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, Down, Down)))
	p.stop()
	x.has(t, "chain stream/a", "goto stream/a")
	x.must(os.Remove(filepath.Join(x.dir, "dataplane.db")))

	p = x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving)))
	p.wait("the stream to serve", func(s State) bool {
		return serves(s, "a", vip.IPv4, "t1") && serves(s, "a", vip.IPv6, "t1") && len(s.VIPs) == 2 && len(s.Problems) == 0
	})
}

// What lb configures while the records cannot be made anew, since the disk is full, is
// put back by nobody: without records nobody knows what is ours.
func TestReconcileWaitsForTheRecords(t *testing.T) {
	w := newWorld()
	w.e = newEngine(Options{Log: slog.New(slog.DiscardHandler)}.withDefaults(), w.k, w.l)
	wanted := wantedOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("a1", Serving)))
	if mended, err := w.e.reconcile(wanted); err == nil || len(mended) > 0 || len(w.l.Streams) > 0 || w.k.base {
		t.Errorf("mended %v, %v", mended, err)
	}
	if err := w.e.load(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.e.reconcile(wanted); err != nil || len(w.l.Streams) != 1 {
		t.Errorf("after the records were read: %v", err)
	}
}
