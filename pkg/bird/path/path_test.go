package path

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
)

func TestFind(t *testing.T) {
	t.Parallel()
	at := netip.MustParseAddr
	link := turns.Session{Gateway: trench.Gateway{Interface: "ext"}}
	learned := turns.Session{
		Gateway: trench.Gateway{Interface: "ext", Address: at("fe80::9")}, Path: turns.Path{Local: at("fe80::1")},
	}
	numbered := func(address string, families trench.SessionFamilies) turns.Session {
		return turns.Session{Gateway: trench.Gateway{Address: at(address), Families: families}}
	}
	for name, tt := range map[string]struct {
		gateway, current turns.Session
		routers          []string
		err              error
		want             turns.Path
		address, problem string
	}{
		"one router":     {gateway: link, routers: []string{"fe80::9"}, address: "fe80::9", want: learned.Path},
		"current router": {link, learned, []string{"fe80::8", "fe80::9"}, nil, learned.Path, "fe80::9", ""},
		"other router":   {link, learned, []string{"fe80::8"}, nil, learned.Path, "fe80::8", ""},
		"other interface": {
			gateway: turns.Session{Gateway: trench.Gateway{Interface: "int"}}, problem: "not interface int of the gateway",
		},
		"no router":    {gateway: link, problem: "no router on the link yet"},
		"lost router":  {link, learned, nil, nil, learned.Path, "fe80::9", ""},
		"several":      {gateway: link, routers: []string{"fe80::8", "fe80::9"}, problem: "(fe80::8, fe80::9)"},
		"not readable": {gateway: link, err: errors.New("no netlink"), problem: "no netlink"},
		"IPv6 over IPv4": {
			gateway: numbered("10.0.0.9", trench.SessionBoth), address: "10.0.0.9",
			want: turns.Path{Local: at("10.0.0.1"), Local6: at("fd00::1")},
		},
		"IPv4": {
			gateway: numbered("10.0.0.9", trench.OwnFamily), address: "10.0.0.9", want: turns.Path{Local: at("10.0.0.1")},
		},
	} {
		kernel := Kernel{Routers: func(string) (list []netip.Addr, _ error) {
			for _, router := range tt.routers {
				list = append(list, at(router))
			}
			return list, tt.err
		}}
		addrs := []rtnetlink.Address{addr("10.0.0.1/24"), addr("fe80::1/64"), addr("fd00::1/64")}
		found, problem := kernel.Find("ext", tt.gateway, tt.current, addrs)
		if tt.problem != "" {
			if !strings.Contains(problem, tt.problem) {
				t.Errorf("%s: problem %q", name, problem)
			}
			continue
		}
		if problem != "" || found.Path != tt.want || found.Address != at(tt.address) {
			t.Errorf("%s: %q, %+v at %s", name, problem, found.Path, found.Address)
		}
	}
}
