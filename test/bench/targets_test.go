package main

import (
	"bytes"
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestRow14TargetAddresses(t *testing.T) {
	const n = 10_000
	fx := &fixture{vips: numberedVIPs(n/targetsPerStream, oneFamily), families: oneFamily}
	config, err := trenchfile.Parse("f", []byte(fx.targetsTrench()), trench.DefaultDefaults())
	harness.Must(t, err)
	addresses := map[string]bool{}
	for _, s := range config.Streams {
		if len(s.VIPs) != 1 || s.MinReady != targetsPerStream || s.VIPs[0].Family() != vip.IPv4 {
			t.Fatalf("stream %+v", s)
		}
		for _, x := range s.Targets {
			addresses[x.IPs[0].String()] = true
		}
	}
	if len(addresses) != n {
		t.Errorf("%d addresses, want %d", len(addresses), n)
	}
}

func TestRow14ReferenceGoal(t *testing.T) {
	for _, args := range [][]string{nil, {"many"}, {"1", "2"}} {
		var text bytes.Buffer
		if got := runFieldChecker(args, &text); got != exitUsage || text.Len() == 0 {
			t.Errorf("%q: status %d, %q", args, got, text.String())
		}
	}
}
