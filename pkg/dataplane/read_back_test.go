package dataplane

import (
	"log/slog"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// lossyKernel is a kernel that accepts a write and loses an object.
type lossyKernel struct {
	*modelKernel
	lose func(*modelKernel)
}

func (k lossyKernel) Write(c plan.Change) error {
	err := k.modelKernel.Write(c)
	k.lose(k.modelKernel)
	return err
}

// A VIP is READY only after table, rules and routes were read back. An object that is missing
// after its write is not drift, which may be left unrepaired. It is a problem, and the write is
// retried.
func TestLostWritesAreRetried(t *testing.T) {
	v := vip.Require("20.0.0.1/32")
	for name, lose := range map[string]func(*modelFixture, *modelKernel){
		"entry": func(_ *modelFixture, k *modelKernel) {
			if s := k.Streams["a"]; s != nil {
				s.Tables[vip.IPv4][3] = 0
			}
		},
		"chain of the stream": func(_ *modelFixture, k *modelKernel) {
			if s := k.Streams["a"]; s != nil {
				s.ChainIntact = false
			}
		},
		"port": func(_ *modelFixture, k *modelKernel) {
			if s := k.Streams["a"]; s != nil {
				s.Match = s.Match[1:]
			}
		},
		"VIP":            func(_ *modelFixture, k *modelKernel) { delete(k.VIPs, v) },
		"live element":   func(w *modelFixture, k *modelKernel) { k.slot(w.number("a", "x1")).Flows[vip.IPv4] = false },
		"target's chain": func(w *modelFixture, k *modelKernel) { k.slot(w.number("a", "x1")).ChainIntact = false },
	} {
		t.Run(name, func(t *testing.T) {
			w := newModelFixture()
			loses := true
			w.e = newEngine(Options{Log: slog.New(slog.DiscardHandler)}.withDefaults(), lossyKernel{w.k, func(k *modelKernel) {
				if loses {
					lose(w, k)
				}
			}})
			w.e.now = func() time.Time { return w.clock }
			must(t, w.e.load())
			desired := streamA(testTarget("x1", plan.Serving))
			desired.Streams["a"].Match = siteMatch
			w.e.pass(desired, false)
			s := w.state()
			served := s.VIPs[v] == "a" && s.Streams["a"].Problem[vip.IPv4] == "" && len(s.Streams["a"].Serving[vip.IPv4]) == 1
			if served || len(s.Drift) > 0 || len(s.Problems) == 0 || !w.e.failing() {
				t.Fatalf("served: %v; drift %+v, problems %+v", served, s.Drift, s.Problems)
			}
			loses = false
			w.e.pass(desired, false)
			w.settle(desired, false)
			s = w.state()
			if s.VIPs[v] != "a" || len(s.Streams["a"].Serving[vip.IPv4]) != 1 || len(s.Drift)+len(s.Problems) > 0 ||
				w.e.streams["a"].installed.Stage != plan.StageApplied {
				t.Fatalf("not repaired: %+v", s)
			}
		})
	}
	t.Run("a removal", func(t *testing.T) {
		w := newModelFixture()
		w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving)), false)
		w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Down)), false)
		number := w.number("a", "x2")
		left := *w.k.Targets[number]
		loses := true
		w.e.kernel = lossyKernel{w.k, func(k *modelKernel) {
			if loses {
				*k.slot(number) = left
			}
		}}
		gone := streamA(testTarget("x1", plan.Serving))
		w.e.pass(gone, false)
		if w.e.targets[number].Stage != plan.StageRemoving || len(w.state().Problems) == 0 || !w.e.failing() {
			t.Fatalf("the record of the existing target is %+v, problems %+v", w.e.targets[number], w.state().Problems)
		}
		loses = false
		w.e.pass(gone, false)
		w.settle(gone, false)
		if _, recorded := w.e.targets[number]; recorded || w.k.Targets[number] != nil || len(w.state().Problems) > 0 {
			t.Fatalf("left: %+v, problems %+v", w.k.Targets[number], w.state().Problems)
		}
	})
}
