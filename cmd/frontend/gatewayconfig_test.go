package main

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

func TestGatewayConfigArguments(t *testing.T) {
	all := []trench.Gateway{{Name: "a4"}, {Name: "169.254.100.9"}}
	c := gatewayConfigCommand{Names: []string{"169.254.100.9", "169.254.100.1", "fd00:100::1/64"}}
	named, pods, err := c.arguments(all)
	harness.Must(t, err)
	if len(named) != 1 || named[0].Name != "169.254.100.9" {
		t.Errorf("a name like an address is not a gateway: %v", named)
	}
	if len(pods) != 2 || pods[0].String() != "169.254.100.1/32" || pods[1].String() != "fd00:100::/64" {
		t.Errorf("pods %v", pods)
	}
	c.Names = []string{"a5"}
	_, _, err = c.arguments(all)
	harness.WantError(t, err, `"a5" is neither a gateway`)
}
