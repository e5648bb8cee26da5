package bird

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// BIRD's output with one more route than the limit (2.0.12, 2.20.0, 3.1.8, 3.4.0).
func TestImportLimitIsParsed(t *testing.T) {
	t.Parallel()
	for limit, want := range map[string]string{
		"    Import limit:   3\n":                                          "3 false",
		"    Import limit:   3 [HIT]\n":                                    "3 true",
		"    Receive limit:  9 [HIT]\n":                                    "0 false",
		"    Export limit:   9 [HIT]\n      Action:       block\n":         "0 false",
		"      Import updates:              5          0          [HIT]\n": "0 false",
	} {
		text := "1002-NBR-a BGP --- up 05:27:00 Established\n1006-  Channel ipv4\n " +
			strings.ReplaceAll(strings.TrimSuffix(limit, "\n"), "\n", "\n ") +
			"\n     Routes:         3 imported, 7 exported\n0000 \n"
		p := ParseProtocols(replyOf(t, text))[0]
		channel := p.Channels[vip.IPv4]
		if got := fmt.Sprint(channel.ImportLimit, " ", channel.LimitHit); got != want || channel.Imported != 3 {
			t.Errorf("%q: %s, want %s: %+v", limit, got, want, p)
		}
	}
}

// limited is a protocol with an import limit of 3.
func limited(imported int, hit bool) (protocol Protocol) {
	protocol.Channels[vip.IPv6] = Channel{Imported: imported, ImportLimit: 3, LimitHit: hit}
	return protocol
}

// Routes are requested again with growing delays while BIRD ignores some, and once after that.
func TestImportLimitIsRetried(t *testing.T) {
	t.Parallel()
	for version, sticky := range map[string]bool{"2.0.12": false, "2.20.0": false, "3.1.8": true, "3.4.0": true} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			begin := time.Now()
			m, now := imports{}, begin
			routes, hit := 5, true
			var at []time.Duration
			poll := func(d time.Duration) {
				for end := now.Add(d); now.Before(end); now = now.Add(time.Second) {
					if routes > 3 {
						hit = true
					}
					protocols := map[string]Protocol{
						"NBR-a": limited(min(routes, 3), hit),
						"NBR-b": limited(2, false),
						"LB":    limited(3, true),
					}
					for _, name := range m.observe(now, protocols, version) {
						if name != "NBR-a" {
							t.Errorf("routes of %s are requested", name)
						}
						at = append(at, now.Sub(begin))
						hit = sticky && hit
					}
				}
			}
			blocked := func() bool {
				g := []GatewayState{{Name: "b", Warning: "other"}, {Name: "a", Imported: 3}}
				m.describe(g)
				if g[0].ImportsBlocked || g[0].Warning != "other" || g[1].ImportsBlocked != (g[1].Warning != "") {
					t.Errorf("%+v", g)
				}
				return g[1].ImportsBlocked
			}
			poll(30 * time.Minute)
			want := []time.Duration{30, 90, 210, 450, 930, 1530}
			for i := range want {
				want[i] *= time.Second
			}
			if !slices.Equal(at, want) || !blocked() {
				t.Errorf("requested after %v, want %v; blocked %t", at, want, blocked())
			}
			at, routes = nil, 2
			poll(15 * time.Minute)
			if len(at) != 1 || blocked() {
				t.Errorf("requested %v after the routes are fewer; blocked %t", at, blocked())
			}
			at = nil
			poll(time.Hour)
			if len(at) > 0 || blocked() {
				t.Errorf("requested %v without a limit that is hit; blocked %t", at, blocked())
			}
			routes = 5
			poll(time.Second)
			if !blocked() {
				t.Error("not blocked again")
			}
			if m.observe(now, nil, version); blocked() {
				t.Error("a removed gateway is blocked")
			}
		})
	}
}

// At its limit BIRD 2 ignores new routes until they are requested, even below the limit.
func TestImportsBlocked(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		imported      int
		hit           bool
		bird2, bird34 bool
	}{
		{3, false, false, false}, {2, true, true, false}, {3, true, true, true},
	} {
		p := limited(tt.imported, tt.hit)
		if p.blocked("2.0.12") != tt.bird2 || p.blocked("3.4.0") != tt.bird34 {
			t.Errorf("%+v is blocked: %t, %t", tt, p.blocked("2.0.12"), p.blocked("3.4.0"))
		}
	}
}
