package main

import (
	"bufio"
	"bytes"
	"io"
	"net/netip"
	"slices"
	"testing"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// TestInjectedUpdates decodes the UPDATEs of straight injection.
func TestInjectedUpdates(t *testing.T) {
	vips := numberedVIPs(2*prefixesPerUpdate+1, []vip.Family{vip.IPv4})
	for _, announce := range []bool{true, false} {
		text, err := updates(announce, vips)
		harness.Must(t, err)
		var prefixes []netip.Prefix
		messages := 0
		for ; len(text) > 0; messages++ {
			m, err := bgp.ParseBGPMessage(text)
			harness.Must(t, err)
			text = text[m.Header.Len:]
			u := m.Body.(*bgp.BGPUpdate)
			list, none := u.NLRI, u.WithdrawnRoutes
			if !announce {
				list, none = none, list
			}
			if len(none) > 0 || (len(u.PathAttributes) == 3) != announce {
				t.Fatalf("announce %t: message %+v", announce, u)
			}
			for _, p := range list {
				prefixes = append(prefixes, netip.MustParsePrefix(p.NLRI.String()))
			}
		}
		want := make([]netip.Prefix, len(vips))
		for i, v := range vips {
			want[i] = v.Prefix()
		}
		if !slices.Equal(prefixes, want) || messages != 3 {
			t.Errorf("announce %t: %d prefixes in %d messages", announce, len(prefixes), messages)
		}
	}
}

func TestSkippedMessages(t *testing.T) {
	update, err := updates(true, numberedVIPs(1, oneFamily))
	harness.Must(t, err)
	r := bufio.NewReader(bytes.NewReader(slices.Concat(keepalive(), update, keepalive(), update[:20])))
	for _, want := range []byte{bgp.BGP_MSG_KEEPALIVE, bgp.BGP_MSG_UPDATE, bgp.BGP_MSG_KEEPALIVE} {
		if got, err := skipMessage(r); got != want || err != nil {
			t.Errorf("type %d, %v; want %d", got, err, want)
		}
	}
	if _, err := skipMessage(r); err != io.EOF {
		t.Errorf("a cut message: %v", err)
	}
}
