package healthcheck

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// BenchmarkEvaluate10000 measures the cost of a heartbeat without changes for the loop of the lb:
// the common case, and an evaluation of all targets.
func BenchmarkEvaluate10000(b *testing.B) {
	c := New(Options{Log: discard, dial: newNetwork().DialContext})
	c.Configure([]trench.Stream{stream(10_000, testCheck)})
	now := time.Now()
	c.Evaluate(now)
	b.Run("idle", func(b *testing.B) {
		for b.Loop() {
			c.Evaluate(now)
		}
	})
	b.Run("scan", func(b *testing.B) {
		for b.Loop() {
			c.scanAt = now
			c.Evaluate(now)
		}
	})
}

func BenchmarkConfigure10000(b *testing.B) {
	c := New(Options{Log: discard, dial: newNetwork().DialContext})
	streams := []trench.Stream{stream(10_000, testCheck)}
	b.Run("all new", func(b *testing.B) {
		for b.Loop() {
			c.Configure(nil)
			c.Configure(streams)
		}
	})
	b.Run("none new", func(b *testing.B) {
		for b.Loop() {
			c.Configure(streams)
		}
	})
}
