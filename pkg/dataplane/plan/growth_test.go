package plan

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
)

// desiredOf returns the streams of a configuration whose targets all serve.
func desiredOf(sizes growth.Sizes) map[string]*Stream {
	streams := map[string]*Stream{}
	for _, configured := range sizes.Trench().Streams {
		stream := &Stream{Name: configured.Name, VIPs: configured.VIPs, Size: 1009, Seed: 1}
		for _, target := range configured.Targets {
			target := Target{Name: target.Name, IPs: target.IPs, Roles: [...]Role{Serving, Serving}}
			stream.Targets = append(stream.Targets, target)
		}
		streams[configured.Name] = stream
	}
	return streams
}

// A plan for an empty kernel, the same again, and the end of the streams; and the drift of all.
func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions[:3] {
		growth.Check(t, dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			streams := desiredOf(dimension.Of(n))
			return func() {
				owners := AssignVIPs(streams, nil, nil)
				owners.Limit(nil)
				var caches TableCaches
				now, fwmark := time.Now(), uint32(0)
				for name, stream := range streams {
					input := StreamInput{
						Name: name, Desired: stream, VIPs: owners.Owned[name], Network: &Network{}, Now: now,
						LinkRestored:   func(uint32) bool { return false },
						AllocateFWMark: func() (uint32, error) { fwmark++; return fwmark, nil },
					}
					next := ForStream(input)
					input.Installed, input.Targets, input.Requests = &next.Stream, next.Targets, next.Requests
					next = ForStream(input)
					next.Gains(input.Installed)
					next.Idle(input)
					kernel := next.Stream.Kernel(next.Targets, &caches)
					StreamDrift(next.Stream, kernel, nil, map[vip.VIP]string{})
					var generations Generations
					generations.Note(next.Stream.Tables, now)
					input.Desired = nil
					ForStream(input)
				}
			}
		})
	}
}
