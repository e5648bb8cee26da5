package bird

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
)

// The configuration, and the listing of the routes that a gateway has.
func TestGrowth(t *testing.T) {
	growth.Check(t, "VIPs", 1000, 25_000, func(t *testing.T, n int) func() {
		input := fullInput()
		var listing strings.Builder
		for i := range n {
			input.VIPs = append(input.VIPs, growth.VIP(i))
			fmt.Fprintf(&listing, "1007-%s unicast [LB 12:00:00.000] * (100) [AS8103i]\n", growth.VIP(i))
		}
		return func() {
			_, err := render(input)
			harness.Must(t, err)
			for line := range strings.Lines(listing.String()) {
				RouteOf(line)
			}
		}
	})
}
