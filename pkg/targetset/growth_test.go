package targetset

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/growth"
)

// Targets that come, drain and are renamed, by both sources.
func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions[1:3] {
		growth.Check(t, dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			var edits [3][]trench.Stream
			for edit := range edits {
				edits[edit] = dimension.Of(n).Trench().Streams
				for _, stream := range edits[edit] {
					for i := range stream.Targets {
						target := &stream.Targets[i]
						target.Terminating = edit == 1
						if edit == 2 {
							target.Name += "-next"
						}
					}
				}
			}
			now := time.Unix(1000, 0)
			return func() {
				set, file := New(), NewTrenchFile(Drain)
				for _, streams := range edits {
					set.Configure(streams, AddressPolicy{})
					file.Configure(now, streams)
					offers := file.Take()
					set.Offer(OriginFile, offers)
					set.Offer(OriginRegistry, offers)
					set.Update(now)
					set.Problems(OriginRegistry)
				}
			}
		})
	}
}
