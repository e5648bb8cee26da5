package registry

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
)

// Registrations in a call for each stream, a second one for the same targets, and their drain.
func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions[1:3] {
		growth.Check(t, dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			streams := dimension.Of(n).Trench().Streams
			return func() {
				registry := New(Options{})
				registry.Configure(streams, targetset.AddressPolicy{})
				now := time.Now()
				for _, stream := range streams {
					var names []string
					for _, target := range stream.Targets {
						names = append(names, target.Name)
					}
					for range 2 {
						_, err := registry.open(caller{}, announcement{stream: stream.Name, targets: stream.Targets})
						harness.Must(t, err)
					}
					_, err := registry.deregister(caller{}, stream.Name, names, nil)
					harness.Must(t, err)
				}
				registry.snapshot()
				registry.Configure(streams[:1], targetset.AddressPolicy{})
				registry.State()
				registry.Take()
				registry.expire(now.Add(time.Hour), 0)
			}
		})
	}
}
