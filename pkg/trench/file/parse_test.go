package file

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestStaticGateways(t *testing.T) {
	const file = `
trench: t
attractor:
  name: a
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
    - {name: g1, address: 169.254.100.150, protocol: static, bfd: {minTx: 100ms}}
    - {name: g2, address: "fd00:100::150", protocol: static, bfd: {minTx: 100ms, minRx: 300ms}}
    - {name: g3, address: 169.254.100.151, protocol: static}
    - {name: g4, address: 169.254.100.152, bfd: {}}
`
	got, err := Parse("f.yaml", []byte(file), trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	bfd := &trench.BFD{MinTx: 100 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: 3}
	want := []trench.Gateway{
		{Name: "g1", Address: netip.MustParseAddr("169.254.100.150"), Protocol: trench.Static, BFD: bfd},
		{Name: "g2", Address: netip.MustParseAddr("fd00:100::150"), Protocol: trench.Static, BFD: bfd},
		{Name: "g3", Address: netip.MustParseAddr("169.254.100.151"), Protocol: trench.Static},
	}
	if diff := cmp.Diff(want, got.Attractor.Gateways[:3], cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Error(diff)
	}
	if last := got.Attractor.Gateways[3]; last.Protocol != trench.BGP || last.LocalASN == 0 {
		t.Errorf("BGP gateway beside static ones: %+v", last)
	}
}

func TestReferenceFile(t *testing.T) {
	got, err := Read("testdata/reference.yaml", trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	want := &trench.Config{
		Trench: "trench-a",
		Attractor: trench.Attractor{
			Name: "attractor-a-1", Interface: "eth7",
			VIPs: []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("2000::1/128"), vip.Require("30.0.0.0/24")},
			Gateways: []trench.Gateway{
				{
					Name: "gateway-a-1", Address: netip.MustParseAddr("169.254.100.150"),
					LocalASN: 64512, RemoteASN: 4200000001, LocalPort: 179, RemotePort: 1179, HoldTime: 9 * time.Second,
					BFD:          &trench.BFD{MinTx: 100 * time.Millisecond, MinRx: 200 * time.Millisecond, Multiplier: 5},
					PasswordFile: "/etc/vipgate/gateway-a-1.key",
				},
				{
					Name: "gateway-a-2", Address: netip.MustParseAddr("fd00:100::150"),
					LocalASN: 8103, RemoteASN: 4248829953, LocalPort: 10179, RemotePort: 10179, HoldTime: 3 * time.Second,
					BFD: &trench.BFD{MinTx: 300 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: 3},
				},
			},
		},
		MaxRemoval: 75, Confirm: "v1f3a5b7c,t00000000",
		Streams: []trench.Stream{
			{
				Name: "stream-a-1", VIPs: []vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")}, MinReady: 2,
				Check: trench.Check{
					SingleCheck: trench.SingleCheck{
						TCP: trench.TCPCheck{Port: 5000}, Interval: 2 * time.Second, FastInterval: 100 * time.Millisecond,
						Timeout: 300 * time.Millisecond, Rise: 1, Fall: 4,
					},
					Sources: [2]netip.Addr{netip.MustParseAddr("172.16.0.1"), netip.MustParseAddr("fd00::9")},
				},
				DrainTime: 30 * time.Second, LastResort: trench.Depreferred, Maglev: trench.Maglev{Size: 10007, Seed: 7},
				Match: []trench.Match{
					{Protocols: []string{"tcp"}, Ports: []uint16{80, 443}},
					{Protocols: []string{"udp", "sctp"}, Ports: []uint16{53}},
				},
				Earlier: []trench.Generation{{Targets: []string{"target-1", "target-3"}}, {Targets: []string{"target-3"}}},
				Targets: []trench.Target{
					{
						Name: "target-1", IPs: []netip.Addr{netip.MustParseAddr("172.16.1.1"), netip.MustParseAddr("fd00::1")},
						Terminating: true,
					},
					{Name: "target-2", IPs: []netip.Addr{netip.MustParseAddr("172.16.1.2")}},
				},
			},
			{
				Name: "stream-a-2", VIPs: []vip.VIP{vip.Require("2000::1/128")}, MinReady: 1, DrainTime: 5 * time.Second,
				Check: byDefault(trench.Check{
					SingleCheck: trench.SingleCheck{TCP: trench.TCPCheck{Port: 6000}}, Via: trench.ViaAddress,
				}),
			},
			{
				Name: "stream-a-3", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, MinReady: 1, DrainTime: 5 * time.Second,
				Check: byDefault(trench.Check{Families: trench.OnlyIPv4, SingleCheck: trench.SingleCheck{HTTP: trench.HTTPCheck{
					Port: 8443, Method: "GET", Path: "/healthz?full=1", Host: "example.org:443", Status: "200-299,404",
					Body: "^(ok|OK)",
					TLS: trench.TLSCheck{
						On: true, ServerName: "sni.example.org", CAFile: "/etc/vipgate/ca.pem",
						CertFile: "/etc/vipgate/client.pem", KeyFile: "/etc/vipgate/client.key",
					},
				}}}),
				Targets: []trench.Target{{
					Name: "target-1",
					IPs:  []netip.Addr{netip.MustParseAddr("172.16.1.1"), netip.MustParseAddr("fd00::1")},
				}},
			},
			{
				Name: "stream-a-4", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, MinReady: 1, DrainTime: 5 * time.Second,
				Check: byDefault(trench.Check{
					Families: trench.OnlyIPv6, Via: trench.ViaVIP,
					SingleCheck: trench.SingleCheck{
						GRPC: trench.GRPCCheck{Port: 9090, Service: "pkg.Service", TLS: trench.TLSCheck{On: true, Insecure: true}},
					},
				}),
			},
			{
				Name: "stream-a-5", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, MinReady: 1,
				Check: byDefault(trench.Check{SingleCheck: trench.SingleCheck{HTTP: trench.HTTPCheck{
					Port: 80, Method: "GET", Path: "/", Status: "200-399",
					TLS: trench.TLSCheck{On: true},
				}}}),
			},
			{Name: "stream-a-6", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, MinReady: 1, DrainTime: 5 * time.Second},
			{
				Name: "stream-a-7", VIPs: []vip.VIP{vip.Require("20.0.0.1/32")}, MinReady: 1, DrainTime: 5 * time.Second,
				// Members take the fields that they leave out from the whole check.
				Check: trench.Check{
					SingleCheck: trench.SingleCheck{
						Interval: 400 * time.Millisecond, FastInterval: 400 * time.Millisecond, Timeout: 400 * time.Millisecond,
						Rise: 1, Fall: 3,
					},
					All: trench.MembersOf(
						trench.SingleCheck{
							HTTP:     trench.HTTPCheck{Port: 80, Method: "GET", Path: "/", Status: "200-399"},
							Interval: 400 * time.Millisecond, FastInterval: 400 * time.Millisecond, Timeout: 400 * time.Millisecond,
							Rise: 1, Fall: 3,
						},
						trench.SingleCheck{
							DNS:      trench.DNSCheck{Port: 53, Name: "example.org", Type: "A", Transport: "udp"},
							Interval: 5 * time.Second, FastInterval: 5 * time.Second, Timeout: 500 * time.Millisecond, Rise: 1, Fall: 2,
						},
					),
					Warmup: 30 * time.Second, Families: trench.OnlyIPv4,
				},
			},
		},
	}
	for i := range want.Streams[1:] {
		want.Streams[1+i].Maglev = trench.Maglev{Size: 1009, Seed: 1}
	}
	got.Digest = want.Digest
	equate := cmpopts.EquateComparable(netip.Addr{}, vip.VIP{}, trench.Members{})
	if diff := cmp.Diff(want, got, equate, cmpopts.EquateEmpty()); diff != "" {
		t.Fatalf("(-want +got)\n%s", diff)
	}
}

// byDefault sets the defaults that all kinds of checks share.
func byDefault(c trench.Check) trench.Check {
	c.Interval, c.FastInterval, c.Timeout, c.Rise, c.Fall = time.Second, time.Second, 500*time.Millisecond, 2, 3
	return c
}

func TestDefaults(t *testing.T) {
	d := trench.Defaults{
		Interface: "eth7", LocalASN: 1, RemoteASN: 2, LocalPort: 3, RemotePort: 4,
		HoldTime: 5 * time.Second,
	}
	c, err := Parse("f", []byte(good), d)
	if err != nil {
		t.Fatal(err)
	}
	g := c.Attractor.Gateways[0]
	want := trench.Gateway{
		Name: g.Name, Address: g.Address, LocalASN: 1, RemoteASN: 2, LocalPort: 3, RemotePort: 4, HoldTime: 5 * time.Second,
	}
	if g != want || c.Attractor.Interface != "eth7" {
		t.Errorf("got %+v of interface %s", g, c.Attractor.Interface)
	}
	for _, tt := range []struct {
		change func(*trench.Defaults)
		want   string
	}{
		{
			func(d *trench.Defaults) { d.LocalASN = 0 },
			"default local AS number is 0, which is reserved (RFC 7607): write the AS number of that side",
		},
		{
			func(d *trench.Defaults) { d.RemotePort = 0 },
			"default BGP ports 3 (local) and 0 (remote): a port lies between 1 and 65535",
		},
		{
			func(d *trench.Defaults) { d.HoldTime = 0 },
			"default hold time is 0s: BGP wants whole seconds between 3s and 65535s (RFC 4271)",
		},
	} {
		bad := d
		tt.change(&bad)
		if _, err := Parse("f", []byte(good), bad); err == nil || err.Error() != tt.want {
			t.Errorf("got  %v\nwant %s", err, tt.want)
		}
	}
}

// good is a valid file. Each test replaces one of its lines.
const good = `trench: trench-a
attractor:
  name: attractor-a-1
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
    - name: gw4
      address: 169.254.100.150
    - name: gw6
      address: fd00:100::150
streams:
  - name: s1
    vips: [20.0.0.1/32]
    check: {tcp: {port: 5000}}
    targets:
      - {name: t1, ips: [172.16.1.1]}
      - {name: t2, ips: [172.16.1.2]}
`

// manyPorts lists the ports 1 to n.
func manyPorts(n int) string {
	var b strings.Builder
	for port := 1; port <= n; port++ {
		fmt.Fprintf(&b, "%d, ", port)
	}
	return strings.TrimSuffix(b.String(), ", ")
}

func TestRefusedFiles(t *testing.T) {
	const fields = "trench, attractor, streams, maxRemoval, confirm, onePodAtATime"
	const gatewayFields = "name, address, interface, protocol, localASN, remoteASN, localPort, remotePort, holdTime, " +
		"keepaliveTime, connectRetryTime, families, multihop, ttlSecurity, bfd, passwordFile"
	const kinds = "tcp, http, grpc, udp, dns, ntp, sctp"
	const memberFields = kinds + ", interval, fastInterval, timeout, rise, fall"
	const checkFields = memberFields + ", any, all, warmup, families, via, source"
	tests := []struct {
		name     string
		old, new string // replaced in good
		want     string // all lines of the error
	}{
		// YAML
		{"syntax", "name: gw4", "name: [gw4", "f.yaml:7: not valid YAML: did not find expected ',' or ']' (while parsing a " +
			"flow sequence that began in line 6): mind the indentation, the brackets and the quotes"},
		{"tab", "  name: attractor-a-1", "\tname: attractor-a-1", "f.yaml:3: not valid YAML: found character that cannot " +
			"start any token (while scanning for the next token that began in line 3): mind the indentation, the brackets and " +
			"the quotes"},
		{"empty", good, "", "f.yaml:1: the file is empty: write the fields trench, attractor and streams"},
		{"comment only", good, "# nothing\n", "f.yaml:1: the file is empty: write the fields trench, attractor and streams"},
		{
			"second document", "streams:", "---\nstreams:",
			"f.yaml:10: a second YAML document begins here: one file holds one " +
				"trench, remove the --- line and what does not belong to it",
		},
		{"list at the top", good, "- a\n", "f.yaml:1: is a list: write a mapping with the fields " + fields},
		{"scalar at the top", good, "hello\n", "f.yaml:1: is \"hello\": write a mapping with the fields " + fields},
		{"not UTF-8", "gw4", "gw\xff", "f.yaml:6: the file is not UTF-8 here: save the file as plain UTF-8 text"},
		{
			"control character", "gw4", "gw\x00",
			"f.yaml:6: the file has the control character 0x00 here: save the file as plain UTF-8 text",
		},
		{
			"unknown alias", "[20.0.0.1/32]", "*vips",
			"f.yaml:12: not valid YAML: unknown anchor 'vips' referenced: mind the indentation, the brackets and the quotes",
		},
		{
			"alias to itself", "[20.0.0.1/32]", "&x [*x]",
			"f.yaml:12: streams[0].vips[0]: is a list: write a VIP such as 20.0.0.1/32 or 2000::1/128",
		},
		{"merge key", "name: gw4", "<<: {name: gw4}", "f.yaml:6: attractor.gateways[0].<<: merge keys are not supported: " +
			"write the fields out, or use an alias for a whole value\nf.yaml:6: attractor.gateways[0].name: is missing: write " +
			"a name for the gateway"},
		{
			"tag", "name: gw4", "name: !secret gw4",
			"f.yaml:6: attractor.gateways[0].name: has the YAML tag !secret: remove the tag",
		},
		{
			"key that is no name", "trench: trench-a", "trench: trench-a\n[a, b]: c",
			"f.yaml:2: a field's name is a list: the fields here are " + fields,
		},

		// Fields
		{
			"unknown field", "name: gw4", "name: gw4\n      color: red",
			"f.yaml:7: attractor.gateways[0].color: unknown field: the fields here are " + gatewayFields,
		},
		{"misspelt field", "name: gw4", "name: gw4\n      remote_asn: 1", "f.yaml:7: attractor.gateways[0].remote_asn: " +
			"unknown field, did you mean \"remoteASN\": the fields here are " + gatewayFields},
		{
			"field with a line break", "trench: trench-a", "trench: trench-a\n\"a\\nb\": 1",
			"f.yaml:2: \"a…\": unknown field: the fields here are " + fields,
		},
		{
			"duplicate field", "trench: trench-a", "trench: trench-a\ntrench: b",
			"f.yaml:2: trench: appears twice, first in line 1: remove one of them",
		},
		{"no trench", "trench: trench-a", "", "f.yaml:2: trench: is missing: write the name of the trench"},
		{
			"trench without a value", "trench: trench-a", "trench:",
			"f.yaml:1: trench: is empty: write 1 to 60 characters out of A-Z a-z 0-9 _ . -",
		},
		{"no attractor", good, "trench: a\n", "f.yaml:1: attractor: is missing: write its name, vips and gateways"},
		{
			"no attractor name", "  name: attractor-a-1\n", "",
			"f.yaml:3: attractor.name: is missing: write the name of the attractor",
		},
		{
			"no VIPs", "  vips: [20.0.0.1/32, \"2000::1/128\"]\n", "",
			"f.yaml:3: attractor.vips: is missing: write a list of VIPs such as [20.0.0.1/32], or [] for none",
		},
		{"VIPs are no list", `[20.0.0.1/32, "2000::1/128"]`, "20.0.0.1/32", "f.yaml:4: attractor.vips: is \"20.0.0.1/32\", " +
			"not a list: write a list of VIPs such as [20.0.0.1/32], or [] for none"},
		{
			"gateways are no list", good[strings.Index(good, "gateways:"):strings.Index(good, "streams:")], "gateways: {}\n",
			"f.yaml:5: attractor.gateways: is a mapping, not a list: write a list of gateways, or [] for none",
		},
		{
			"streams are null", good[strings.Index(good, "streams:"):], "streams:\n",
			"f.yaml:10: streams: is empty, not a list: write a list of streams, or [] for none",
		},
		{
			"gateway is a scalar", "    - name: gw4\n      address: 169.254.100.150\n", "    - gw4\n",
			"f.yaml:6: attractor.gateways[0]: is \"gw4\": write a mapping with the fields " + gatewayFields,
		},

		// Names
		{
			"gateway name with a space", "name: gw4", "name: gw 4",
			"f.yaml:6: attractor.gateways[0].name: is \"gw 4\": write 1 to 60 characters out of A-Z a-z 0-9 _ . -",
		},
		{
			"gateway name with a quote", "name: gw4", `name: "gw\"4"`,
			"f.yaml:6: attractor.gateways[0].name: is \"gw\\\"4\": write 1 to 60 characters out of A-Z a-z 0-9 _ . -",
		},
		{"gateway name too long", "name: gw4", "name: " + strings.Repeat("g", 61), "f.yaml:6: attractor.gateways[0].name: " +
			"is \"" + strings.Repeat("g", 61) + "\": write 1 to 60 characters out of A-Z a-z 0-9 _ . -"},
		{
			"gateway name BFD", "name: gw4", "name: BFD",
			"f.yaml:6: attractor.gateways[0].name: is \"BFD\": BIRD's protocol NBR-BFD has that name, take another",
		},
		{
			"empty stream name", "name: s1", `name: ""`,
			"f.yaml:11: streams[0].name: is empty: write 1 to 60 characters out of A-Z a-z 0-9 _ . -",
		},
		{
			"duplicate gateway name", "name: gw6", "name: gw4",
			"f.yaml:8: attractor.gateways[1].name: gateway gw4 appears twice, first in line 6: remove one of them or change it",
		},
		{"duplicate gateway address", "address: fd00:100::150", "address: 169.254.100.150", "f.yaml:9: " +
			"attractor.gateways[1].address: gateway address 169.254.100.150 appears twice, first in line 7: remove one of " +
			"them or change it"},
		{"duplicate stream", "    check: {tcp: {port: 5000}}\n", "    check: {tcp: {port: 5000}}\n  - name: s1\n    vips: " +
			"[20.0.0.1/32]\n    check: {tcp: {port: 5000}}\n", "f.yaml:14: streams[1].name: stream s1 appears twice, first in " +
			"line 11: remove one of them or change it"},
		{
			"duplicate target", "name: t2", "name: t1",
			"f.yaml:16: streams[0].targets[1].name: target t1 appears twice, first in line 15: remove one of them or change it",
		},

		// VIPs
		{
			"VIP is no prefix", "[20.0.0.1/32]", "[20.0.0.1]",
			"f.yaml:12: streams[0].vips[0]: VIP \"20.0.0.1\" has no prefix length; use 20.0.0.1/32",
		},
		{
			"VIP is nonsense", `[20.0.0.1/32, "2000::1/128"]`, "[20.0.0.1/32, hello]",
			"f.yaml:4: attractor.vips[1]: VIP \"hello\" is not a prefix such as 20.0.0.1/32 or 2000::1/128",
		},
		{
			"VIP is a default route", `[20.0.0.1/32, "2000::1/128"]`, "[20.0.0.1/32, ::/0]",
			"f.yaml:4: attractor.vips[1]: VIP ::/0 is a default route, which attracts all traffic; use the addresses to serve",
		},
		{
			"VIP is IPv4-mapped", `"2000::1/128"]`, `"::ffff:1.2.3.4/128"]`,
			"f.yaml:4: attractor.vips[1]: VIP ::ffff:1.2.3.4/128 is an IPv4-mapped prefix; use IPv4 notation",
		},
		{
			"VIP is null", `"2000::1/128"]`, `"2000::1/128", null]`,
			"f.yaml:4: attractor.vips[2]: is empty: write a VIP such as 20.0.0.1/32 or 2000::1/128",
		},
		{
			"duplicate VIP", `"2000::1/128"]`, `"2000::1/128", 2000:0::1/128]`,
			"f.yaml:4: attractor.vips[2]: VIP 2000::1/128 appears twice, first in line 4: remove one of them or change it",
		},
		{
			"too many VIPs", `"2000::1/128"]`, `"2000::1/128"` + strings.Repeat(", 20.0.0.1/32", trench.MaxVIPs) + `]`,
			"f.yaml:4: attractor.vips: has 50002 items: write 50000 at most",
		},
		{
			"overlapping VIPs", `[20.0.0.1/32, "2000::1/128"]`, "\n    - 20.0.0.1/32\n    - 20.0.0.0/24\n    - 2000::1/128",
			"f.yaml:5: attractor.vips[0]: VIP 20.0.0.1/32 lies in the VIP 20.0.0.0/24 in line 6: remove one " +
				"of them, since the wider VIP attracts the traffic of the narrower one even while that is withdrawn",
		},
		{
			"duplicate VIP in other lines", `[20.0.0.1/32, "2000::1/128"]`,
			"\n    - 20.0.0.1/32\n    - 2000::1/128\n    - 2000:0::1/128",
			"f.yaml:7: attractor.vips[2]: VIP 2000::1/128 appears twice, first in line 6: remove one of them or change it",
		},
		{"stream VIP that overlaps the attractor's", "[20.0.0.1/32]", "[20.0.0.0/24]", "f.yaml:12: streams[0].vips[0]: VIP " +
			"20.0.0.0/24 is not one of the attractor: add it to attractor.vips or remove it here"},
		{"stream VIP not in the attractor", "[20.0.0.1/32]", "[20.0.0.2/32]", "f.yaml:12: streams[0].vips[0]: VIP " +
			"20.0.0.2/32 is not one of the attractor: add it to attractor.vips or remove it here"},
		{
			"stream VIP twice", "[20.0.0.1/32]", "[20.0.0.1/32, 20.0.0.1/32]",
			"f.yaml:12: streams[0].vips[1]: VIP 20.0.0.1/32 appears twice, first in line 12: remove one of them or change it",
		},
		{
			"empty match", "name: s1", "name: s1\n    match: []", "f.yaml:12: streams[0].match: is an empty list: " +
				"write protocols and ports, or remove the field to forward all packets",
		},
		{
			"match that is no list", "name: s1", "name: s1\n    match: {protocols: [tcp], ports: [80]}",
			"f.yaml:12: streams[0].match: is a mapping, not a list: write a list of match",
		},
		{
			"match without ports", "name: s1", "name: s1\n    match: [{protocols: [tcp]}]",
			"f.yaml:12: streams[0].match[0].ports: is missing: write a list such as [80, 443]",
		},
		{
			"match without protocols", "name: s1", "name: s1\n    match: [{ports: [80]}]",
			"f.yaml:12: streams[0].match[0].protocols: is missing: write a list such as [tcp]",
		},
		{
			"empty lists in a match", "name: s1", "name: s1\n    match: [{protocols: [], ports: []}]",
			"f.yaml:12: streams[0].match[0].protocols: is an empty list: write a list such as [tcp], or remove the entry\n" +
				"f.yaml:12: streams[0].match[0].ports: is an empty list: write a list such as [80, 443], or remove the entry",
		},
		{
			"match of ICMP", "name: s1", "name: s1\n    match: [{protocols: [icmp], ports: [80]}]",
			"f.yaml:12: streams[0].match[0].protocols[0]: is \"icmp\": write tcp, udp or sctp",
		},
		{
			"match of port 0", "name: s1", "name: s1\n    match: [{protocols: [tcp], ports: [0, 65536, http]}]",
			"f.yaml:12: streams[0].match[0].ports[0]: is \"0\": write a whole number between 1 and 65535\n" +
				"f.yaml:12: streams[0].match[0].ports[1]: is \"65536\": write a whole number between 1 and 65535\n" +
				"f.yaml:12: streams[0].match[0].ports[2]: is \"http\": write a whole number between 1 and 65535",
		},
		{
			"match with a duplicate protocol", "name: s1", "name: s1\n    match: [{protocols: [tcp, tcp], ports: []}]",
			"f.yaml:12: streams[0].match[0].protocols[1]: protocol tcp appears twice, first in line 12: remove one of them " +
				"or change it\nf.yaml:12: streams[0].match[0].ports: is an empty list: write a list such as [80, 443], or " +
				"remove the entry",
		},
		{
			"match with a duplicate port", "name: s1", "name: s1\n    match: [{protocols: [tcp, udp], ports: [80, 80]}]",
			"f.yaml:12: streams[0].match[0].ports[1]: port 80 appears twice, first in line 12: remove one of them or change it",
		},
		{
			"port of two entries of a match", "name: s1",
			"name: s1\n    match:\n      - {protocols: [tcp, udp], ports: [53]}\n      - {protocols: [udp], ports: [80, 53]}",
			"f.yaml:14: streams[0].match[1].ports[1]: udp port 53 appears twice, first in line 13: remove one of them or " +
				"change it",
		},
		{
			"match with too many ports", "name: s1",
			"name: s1\n    match: [{protocols: [tcp, udp], ports: [" + manyPorts(50) + "]}, {protocols: [sctp], ports: [1]}]",
			"f.yaml:12: streams[0].match: has 101 ports, each counted for each of its protocols: a stream has 100 at most, " +
				"leave the field out to forward all packets",
		},
		{
			"stream without VIPs", "[20.0.0.1/32]", "[]",
			"f.yaml:12: streams[0].vips: is an empty list: write its VIPs, or remove the stream",
		},

		// Gateways
		{
			"no address", "      address: 169.254.100.150\n", "",
			"f.yaml:6: attractor.gateways[0].address: is missing: write the gateway's IP address, " +
				"or interface for the router on the link",
		},
		{
			"address is a host name", "169.254.100.150", "router.example",
			"f.yaml:7: attractor.gateways[0].address: is \"router.example\", not an IP address: write one such as 172.16.1.1",
		},
		{"address is a prefix", "169.254.100.150", "169.254.100.150/24", "f.yaml:7: attractor.gateways[0].address: is " +
			"\"169.254.100.150/24\", which has a prefix length: write 169.254.100.150"},
		{"address is multicast", "169.254.100.150", "224.0.0.1", "f.yaml:7: attractor.gateways[0].address: is 224.0.0.1, a " +
			"multicast or broadcast address: write the address of one host"},
		{"address is broadcast", "169.254.100.150", "255.255.255.255", "f.yaml:7: attractor.gateways[0].address: is " +
			"255.255.255.255, a multicast or broadcast address: write the address of one host"},
		{
			"address is unspecified", "fd00:100::150", "\"::\"",
			"f.yaml:9: attractor.gateways[1].address: is ::, the unspecified address: write the address of one host",
		},
		{
			"address is IPv4-mapped", "169.254.100.150", "::ffff:169.254.100.150",
			"f.yaml:7: attractor.gateways[0].address: is ::ffff:169.254.100.150, an IPv4-mapped address: write 169.254.100.150",
		},
		{
			"address is loopback", "169.254.100.150", "127.0.0.1",
			"f.yaml:7: attractor.gateways[0].address: is 127.0.0.1, a loopback address: write the address of one host",
		},
		{
			"address has a zone", "fd00:100::150", "fe80::1%eth0",
			"f.yaml:9: attractor.gateways[1].address: is \"fe80::1%eth0\", which has a zone: write an address that needs none",
		},
		{
			"address is link-local IPv6", "fd00:100::150", "fe80::1",
			"f.yaml:9: attractor.gateways[1].address: is fe80::1, an " +
				"IPv6 link-local address: write a global or unique local address",
		},
		{"address is a VIP", "169.254.100.150", "20.0.0.1", "f.yaml:7: attractor.gateways[0].address: is 20.0.0.1, which " +
			"lies in the VIP 20.0.0.1/32: a gateway cannot be reached through itself, change one of them"},
		{
			"an address and an interface", "name: gw4", "name: gw4\n      interface: ext-vlan",
			"f.yaml:7: attractor.gateways[0].interface: conflicts with the address in line 8: write only one of them",
		},
		{
			"an interface and hops", "      address: 169.254.100.150\n", "      interface: eth0\n      multihop: 2\n",
			"f.yaml:8: attractor.gateways[0].multihop: conflicts with interface: link-local addresses cross no " +
				"router: remove it, or write an address",
		},
		{
			"both families over routers", "name: gw4", "name: gw4\n      multihop: 2\n      families: both",
			"f.yaml:8: attractor.gateways[0].families: conflicts with multihop: the path to the gateway has one family: " +
				"write a gateway for each family",
		},
		{
			"the other family over routers", "name: gw4", "name: gw4\n      multihop: 2\n      families: ipv6",
			"f.yaml:8: attractor.gateways[0].families: conflicts with multihop: the path to the gateway has one family: " +
				"write a gateway for each family",
		},
		{
			"keepalive time", "name: gw4", "name: gw4\n      keepaliveTime: 2s\n      connectRetryTime: 1500ms",
			"f.yaml:7: attractor.gateways[0].keepaliveTime: is 2s, more than a third of the hold time 3s: " +
				"write at most a third (RFC 4271 section 10), or leave it out\n" +
				"f.yaml:8: attractor.gateways[0].connectRetryTime: is 1.5s: write whole seconds",
		},
		{
			"static gateway with fields of BGP", "name: gw4", "name: gw4\n      protocol: static\n      localASN: 7\n" +
				"      holdTime: 3s\n      passwordFile: /key",
			"f.yaml:8: attractor.gateways[0].localASN: conflicts with protocol: static, which has no BGP session: remove it, " +
				"or write protocol: bgp\n" +
				"f.yaml:9: attractor.gateways[0].holdTime: conflicts with protocol: static, which has no BGP session: remove it, " +
				"or write protocol: bgp\n" +
				"f.yaml:10: attractor.gateways[0].passwordFile: conflicts with protocol: static, which has no BGP session: " +
				"remove it, or write protocol: bgp",
		},
		{
			"static gateways with different BFD", "name: gw4",
			"name: g0\n      address: 169.254.100.151\n      protocol: static\n" +
				"    - name: g1\n      address: 169.254.100.152\n      protocol: static\n      bfd: {}\n" +
				"    - name: g2\n      address: 169.254.100.153\n      bfd: {minTx: 50ms}\n" +
				"    - name: gw4\n      protocol: static\n      bfd: {minTx: 100ms}",
			"f.yaml:18: attractor.gateways[3].bfd: differs from static gateway \"g1\" in line 12: static " +
				"gateways share the BFD parameters of the interface, write the same values",
		},
		{
			"other protocol", "name: gw4", "name: gw4\n      protocol: ospf",
			"f.yaml:7: attractor.gateways[0].protocol: is \"ospf\": write bgp or static",
		},
		{
			"address is reserved", "169.254.100.150", "240.0.0.1",
			"f.yaml:7: attractor.gateways[0].address: is 240.0.0.1, a reserved address: write the address of one host",
		},
		{
			"target is an IPv4-mapped loopback address", "172.16.1.1", "'::ffff:127.0.0.1'",
			"f.yaml:15: streams[0].targets[0].ips[0]: is ::ffff:127.0.0.1, an IPv4-mapped address: write 127.0.0.1",
		},
		{
			"target on loopback via vip", "{tcp: {port: 5000}}\n    targets:\n      - {name: t1, ips: [172.16.1.1]}",
			"{tcp: {port: 5000}, via: vip}\n    targets:\n      - {name: t1, ips: [127.0.0.1]}",
			"f.yaml:15: streams[0].targets[0].ips[0]: is 127.0.0.1, but check.via is vip, and no route leads to this host " +
				"itself: remove via",
		},
		{
			"target in 0.0.0.0/8", "172.16.1.1", "0.0.0.7",
			"f.yaml:15: streams[0].targets[0].ips[0]: is 0.0.0.7, a reserved address: write the address of one host",
		},
		{
			"source on loopback", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: [127.0.0.2]}",
			"f.yaml:13: streams[0].check.source[0]: is 127.0.0.2, a loopback address: write the address of one host",
		},
		{
			"AS 0", "name: gw4", "name: gw4\n      localASN: 0",
			"f.yaml:7: attractor.gateways[0].localASN: is \"0\": write a whole number between 1 and 4294967294",
		},
		{"AS_TRANS", "name: gw4", "name: gw4\n      localASN: 23456", "f.yaml:7: attractor.gateways[0].localASN: is 23456, " +
			"which stands for 4-octet AS numbers (RFC 6793): write the AS number itself"},
		{"AS 65535", "name: gw4", "name: gw4\n      localASN: 65535", "f.yaml:7: attractor.gateways[0].localASN: is 65535, " +
			"which is reserved (RFC 7300): write the AS number of that side"},
		{
			"AS with a dot", "name: gw4", "name: gw4\n      localASN: 1.1",
			"f.yaml:7: attractor.gateways[0].localASN: is \"1.1\": write a whole number between 1 and 4294967294",
		},
		{
			"port 0", "name: gw4", "name: gw4\n      localPort: 0",
			"f.yaml:7: attractor.gateways[0].localPort: is \"0\": write a whole number between 1 and 65535",
		},
		{
			"port 65536", "name: gw4", "name: gw4\n      remotePort: 65536",
			"f.yaml:7: attractor.gateways[0].remotePort: is \"65536\": write a whole number between 1 and 65535",
		},
		{
			"negative port", "name: gw4", "name: gw4\n      remotePort: -1",
			"f.yaml:7: attractor.gateways[0].remotePort: is \"-1\": write a whole number between 1 and 65535",
		},
		{
			"octal port", "name: gw4", "name: gw4\n      remotePort: 0179",
			"f.yaml:7: attractor.gateways[0].remotePort: is \"0179\": write a whole number between 1 and 65535",
		},
		{
			"hold time 2 s", "name: gw4", "name: gw4\n      holdTime: 2s",
			"f.yaml:7: attractor.gateways[0].holdTime: is \"2s\": write a duration with its unit between 3s and 65535s",
		},
		{
			"hold time 3.5 s", "name: gw4", "name: gw4\n      holdTime: 3.5s",
			"f.yaml:7: attractor.gateways[0].holdTime: is 3.5s: BGP wants whole seconds between 3s and 65535s (RFC 4271)",
		},
		{
			"hold time too long", "name: gw4", "name: gw4\n      holdTime: 24h",
			"f.yaml:7: attractor.gateways[0].holdTime: is \"24h\": write a duration with its unit between 3s and 65535s",
		},
		{
			"hold time without a unit", "name: gw4", "name: gw4\n      holdTime: 3",
			"f.yaml:7: attractor.gateways[0].holdTime: is \"3\", which has no unit: write 3s or 3ms",
		},
		{
			"BFD without a value", "name: gw4", "name: gw4\n      bfd:",
			"f.yaml:7: attractor.gateways[0].bfd: is empty: write {} for the defaults, or remove the field for no BFD",
		},
		{
			"BFD true", "name: gw4", "name: gw4\n      bfd: true",
			"f.yaml:7: attractor.gateways[0].bfd: is \"true\": write a mapping with the fields minTx, minRx, multiplier",
		},
		{
			"BFD too fast", "name: gw4", "name: gw4\n      bfd: {minTx: 9ms}",
			"f.yaml:7: attractor.gateways[0].bfd.minTx: is \"9ms\": write a duration with its unit between 10ms and 1m",
		},
		{
			"BFD multiplier 0", "name: gw4", "name: gw4\n      bfd: {multiplier: 0}",
			"f.yaml:7: attractor.gateways[0].bfd.multiplier: is \"0\": write a whole number between 1 and 255",
		},
		{"relative password file", "name: gw4", "name: gw4\n      passwordFile: key", "f.yaml:7: " +
			"attractor.gateways[0].passwordFile: is \"key\": write the absolute path of the file with the password, or remove " +
			"the field for no password"},
		{"empty password file", "name: gw4", "name: gw4\n      passwordFile: \"\"", "f.yaml:7: " +
			"attractor.gateways[0].passwordFile: is empty: write the absolute path of the file with the password, or remove " +
			"the field for no password"},

		// Streams
		{
			"no check", "    check: {tcp: {port: 5000}}\n", "",
			"f.yaml:11: streams[0].check: is missing: write how the targets are checked, such as check: {tcp: {port: 5000}}",
		},
		{
			"empty check", "{tcp: {port: 5000}}", "{}",
			"f.yaml:13: streams[0].check: is an empty mapping: write one of " + kinds + ", any, all, such " +
				"as tcp: {port: 5000}, or remove the field",
		},
		{
			"null check", "{tcp: {port: 5000}}", "",
			"f.yaml:13: streams[0].check: is empty: write a mapping with the fields " + checkFields,
		},
		{
			"two checks", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, grpc: {port: 5001}}",
			"f.yaml:13: streams[0].check.grpc: conflicts with tcp: write only one of " + kinds + ", any, all",
		},
		{
			"any and all", "{tcp: {port: 5000}}", "{any: [{tcp: {port: 1}}], all: [{tcp: {port: 1}}]}",
			"f.yaml:13: streams[0].check.all: conflicts with any: write only one of tcp, http, grpc, udp, dns, ntp, sctp, " +
				"any, all",
		},
		{
			"nested check", "{tcp: {port: 5000}}", "{all: [{any: [{tcp: {port: 1}}]}]}",
			"f.yaml:13: streams[0].check.all[0].any: unknown field: the fields here are " + memberFields,
		},
		{
			"member of two kinds", "{tcp: {port: 5000}}", "\n      any:\n        - {tcp: {port: 1}, grpc: {port: 2}}",
			"f.yaml:15: streams[0].check.any[0].grpc: conflicts with tcp: write only one of tcp, http, grpc, udp, dns, ntp, " +
				"sctp",
		},
		{
			"member without kind", "{tcp: {port: 5000}}", "{any: [{tcp: {port: 1}}, {rise: 1}]}",
			"f.yaml:13: streams[0].check.any[1]: has none of tcp, http, grpc, udp, dns, ntp, sctp: write one of them, such " +
				"as tcp: {port: 5000}",
		},
		{
			"empty member", "{tcp: {port: 5000}}", "{any: [{tcp: {port: 1}}, {}]}",
			"f.yaml:13: streams[0].check.any[1]: is an empty mapping: write checks such as {tcp: {port: 5000}}, or remove " +
				"the field",
		},
		{
			"member twice", "{tcp: {port: 5000}}", "\n      any:\n        - {tcp: {port: 1}}\n        - {tcp: {port: 1}}",
			"f.yaml:16: streams[0].check.any[1]: is the check in line 15: remove one of them or change it",
		},
		{
			"too many members", "{tcp: {port: 5000}}",
			"{all: [{tcp: {port: 1}}, {tcp: {port: 2}}, {tcp: {port: 3}}, {tcp: {port: 4}}, {tcp: {port: 5}}]}",
			"f.yaml:13: streams[0].check.all: has 5 items: write 4 at most",
		},
		{
			"timeout of a member", "{tcp: {port: 5000}}", "{all: [{tcp: {port: 1}, timeout: 2s}]}",
			"f.yaml:13: streams[0].check.all[0].timeout: is 2s, longer than the interval of 1s: write at most the interval",
		},
		{
			"warmup", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, warmup: 2h}",
			"f.yaml:13: streams[0].check.warmup: is \"2h\": write a duration with its unit between 0s and 1h",
		},
		{
			"three checks", "{tcp: {port: 5000}}", "{grpc: {port: 1}, tcp: {port: 2}, http: {port: 3}}",
			"f.yaml:13: streams[0].check.grpc: conflicts with tcp: write only one of " + kinds + ", any, all\n" +
				"f.yaml:13: " +
				"streams[0].check.http: conflicts with tcp: write only one of " + kinds + ", any, all",
		},
		{
			"unknown check", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, icmp: {}}",
			"f.yaml:13: streams[0].check.icmp: unknown field: the fields here are " + checkFields,
		},
		{
			"check without a port", "{tcp: {port: 5000}}", "{tcp: {}}",
			"f.yaml:13: streams[0].check.tcp.port: is missing: write the TCP port to connect to",
		},
		{
			"check port out of range", "{port: 5000}", "{port: 70000}",
			"f.yaml:13: streams[0].check.tcp.port: is \"70000\": write a whole number between 1 and 65535",
		},
		{
			"interval 0", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, interval: 0s}",
			"f.yaml:13: streams[0].check.interval: is \"0s\": write a duration with its unit between 10ms and 1h",
		},
		{
			"timeout longer than the interval", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, interval: 1s, timeout: 2s}",
			"f.yaml:13: streams[0].check.timeout: is 2s, longer than the interval of 1s: write at most the interval",
		},
		{
			"rise 0", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, rise: 0}",
			"f.yaml:13: streams[0].check.rise: is \"0\": write a whole number between 1 and 100",
		},
		{
			"fall too high", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, fall: 101}",
			"f.yaml:13: streams[0].check.fall: is \"101\": write a whole number between 1 and 100",
		},
		{
			"fast interval longer than the interval", "{tcp: {port: 5000}}",
			"{tcp: {port: 5000}, interval: 1s, fastInterval: 2s}", "f.yaml:13: streams[0].check.fastInterval: is 2s, longer " +
				"than the interval of 1s: write at most the interval",
		},
		{
			"fast interval too short", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, fastInterval: 9ms}",
			"f.yaml:13: streams[0].check.fastInterval: is \"9ms\": write a duration with its unit between 10ms and 1h",
		},
		{
			"drain time without a unit", "name: s1", "name: s1\n    drainTime: 5",
			"f.yaml:12: streams[0].drainTime: is \"5\", which has no unit: write 5s or 5ms",
		},
		{
			"drain time 0", "name: s1", "name: s1\n    drainTime: 0",
			"f.yaml:12: streams[0].drainTime: is \"0\": write a duration with its unit between 0s and 1h",
		},
		{
			"drain time too long", "name: s1", "name: s1\n    drainTime: 2h",
			"f.yaml:12: streams[0].drainTime: is \"2h\": write a duration with its unit between 0s and 1h",
		},
		{
			"families", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, families: v4}",
			"f.yaml:13: streams[0].check.families: is \"v4\": write both, ipv4 or ipv6",
		},
		{
			"path of checks", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, via: VIP}",
			"f.yaml:13: streams[0].check.via: is \"VIP\": write vip or address",
		},
		{
			"source is one address", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: 10.0.0.1}",
			"f.yaml:13: streams[0].check.source: is \"10.0.0.1\", not a list: write a list of addresses such as [172.16.1.1]",
		},
		{
			"no source", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: []}",
			"f.yaml:13: streams[0].check.source: is an empty list: write the addresses to check from, or remove the field",
		},
		{
			"two sources of a family", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: [10.0.0.1, 10.0.0.2]}",
			"f.yaml:13: streams[0].check.source[1]: is a second IPv4 address: checks of a family come from one",
		},
		{"source is multicast", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: [\"ff02::1\"]}", "f.yaml:13: " +
			"streams[0].check.source[0]: is ff02::1, a multicast or broadcast address: write the address of one host"},
		{"source is a VIP", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, source: [20.0.0.1]}", "f.yaml:13: " +
			"streams[0].check.source[0]: is 20.0.0.1, which lies in the VIP 20.0.0.1/32: what comes from a VIP is sent to the " +
			"gateways, write an address of the load balancer's own"},
		{"source of a family that is not checked", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, families: ipv4, source: " +
			"[\"fd00::9\"]}", "f.yaml:13: streams[0].check.source[0]: is fd00::9, but families is ipv4, so that nothing would " +
			"be checked from it: remove it, or write families: both"},

		// HTTP, gRPC and TLS
		{
			"http without a port", "{tcp: {port: 5000}}", "{http: {path: /}}",
			"f.yaml:13: streams[0].check.http.port: is missing: write the TCP port to connect to",
		},
		{
			"http is a port", "{tcp: {port: 5000}}", "{http: 80}",
			"f.yaml:13: streams[0].check.http: is \"80\": write a mapping with the fields port, method, path, host, " +
				"headers, status, body, tls",
		},
		{"path without a slash", "{tcp: {port: 5000}}", "{http: {port: 80, path: healthz}}", "f.yaml:13: " +
			"streams[0].check.http.path: is \"healthz\": write a path such as /healthz or /healthz?full=1, in at most 1000 " +
			"characters of ASCII, others and spaces as %20"},
		{
			"path with a line break", "{tcp: {port: 5000}}", `{http: {port: 80, path: "/a\r\nHost: b"}}`,
			`f.yaml:13: streams[0].check.http.path: is "/a\r\nHost: b": write a path such as /healthz or ` +
				`/healthz?full=1, in at most 1000 characters of ASCII, others and spaces as %20`,
		},
		{"path with half an escape", "{tcp: {port: 5000}}", "{http: {port: 80, path: /100%}}", "f.yaml:13: " +
			"streams[0].check.http.path: is \"/100%\", in which a % is not followed by two hexadecimal digits: write %25 for " +
			"a percent sign"},
		{"host is a URL", "{tcp: {port: 5000}}", "{http: {port: 80, host: \"http://a\"}}", "f.yaml:13: " +
			"streams[0].check.http.host: is \"http://a\": write a name or address such as example.org, 10.0.0.1:8080 or " +
			"[fd00::1]:8080, in ASCII"},
		{"host is bare IPv6", "{tcp: {port: 5000}}", "{http: {port: 80, host: \"fd00::1\"}}", "f.yaml:13: " +
			"streams[0].check.http.host: is \"fd00::1\": write a name or address such as example.org, 10.0.0.1:8080 or " +
			"[fd00::1]:8080, in ASCII"},
		{"status", "{tcp: {port: 5000}}", "{http: {port: 80, status: 2xx}}", "f.yaml:13: streams[0].check.http.status: is " +
			"\"2xx\": write numbers and ranges between 200 and 599, such as \"200-399,404\", at most 20"},
		{"status is a list", "{tcp: {port: 5000}}", "{http: {port: 80, status: [200]}}", "f.yaml:13: " +
			"streams[0].check.http.status: is a list: write numbers and ranges between 200 and 599, such as \"200-399,404\", " +
			"at most 20"},
		{
			"status backwards", "{tcp: {port: 5000}}", "{http: {port: 80, status: \"404,399-200\"}}",
			"f.yaml:13: streams[0].check.http.status: has the range 399-200, whose end lies before its begin: write 200-399",
		},
		{"body", "{tcp: {port: 5000}}", "{http: {port: 80, body: \"a(b\"}}", "f.yaml:13: streams[0].check.http.body: is " +
			"\"a(b\", no regular expression (RE2): missing closing ) at \"a(b\": change it, or write \\Q before text that is " +
			"meant literally"},
		{
			"body that looks back", "{tcp: {port: 5000}}", `{http: {port: 80, body: '(a)\1'}}`,
			`f.yaml:13: streams[0].check.http.body: is "(a)\\1", no regular expression (RE2): ` +
				`invalid escape sequence at "\\1": change it, or write \Q before text that is meant literally`,
		},
		{
			"body too long", "{tcp: {port: 5000}}", "{http: {port: 80, body: " + strings.Repeat("ä", 1001) + "}}",
			"f.yaml:13: streams[0].check.http.body: is \"" + strings.Repeat("ä",
				50) + "…\": write a regular expression (RE2) of 1 to 1000 characters, or remove the field to take any body",
		},
		{"service with a space", "{tcp: {port: 5000}}", "{grpc: {port: 80, service: a b}}", "f.yaml:13: " +
			"streams[0].check.grpc.service: is \"a b\": write the name of a service in 1 to 200 characters of ASCII without a " +
			"space, or remove the field for the whole server"},
		{
			"TLS without a value", "{tcp: {port: 5000}}", "{grpc: {port: 80, tls: }}",
			"f.yaml:13: streams[0].check.grpc.tls: is empty: write {} for the defaults, or remove the field for plaintext",
		},
		{"server name", "{tcp: {port: 5000}}", "{http: {port: 80, tls: {serverName: büro}}}", "f.yaml:13: " +
			"streams[0].check.http.tls.serverName: is \"büro\": write the name or address that the certificate has, such as " +
			"example.org, in ASCII"},
		{
			"authorities in a relative file", "{tcp: {port: 5000}}", "{http: {port: 80, tls: {caFile: ca.pem}}}",
			"f.yaml:13: streams[0].check.http.tls.caFile: is \"ca.pem\": write the absolute path of the PEM file with the " +
				"authorities, or remove the field for the system's",
		},
		{
			"client certificate without a key", "{tcp: {port: 5000}}", "{http: {port: 80, tls: {certFile: /c.pem}}}",
			"f.yaml:13: streams[0].check.http.tls.certFile: needs keyFile, the other half of the client certificate: write " +
				"both, or none",
		},
		{
			"key without a client certificate", "{tcp: {port: 5000}}", "{grpc: {port: 80, tls: {keyFile: /c.key}}}",
			"f.yaml:13: streams[0].check.grpc.tls.keyFile: needs certFile, the other half of the client certificate: write " +
				"both, or none",
		},
		{
			"authorities for nothing", "{tcp: {port: 5000}}", "{http: {port: 80, tls: {insecure: true, caFile: /ca.pem}}}",
			"f.yaml:13: streams[0].check.http.tls.caFile: conflicts with insecure: true, which takes any certificate: remove " +
				"one of them",
		},
		{
			"insecure is no boolean", "{tcp: {port: 5000}}", "{http: {port: 80, tls: {insecure: 1}}}",
			"f.yaml:13: streams[0].check.http.tls.insecure: is \"1\": write true or false",
		},
		{
			"minReady 0", "name: s1", "name: s1\n    minReady: 0",
			"f.yaml:12: streams[0].minReady: is \"0\": write a whole number between 1 and 1000000",
		},

		{
			"maglev without a value", "name: s1", "name: s1\n    maglev:",
			"f.yaml:12: streams[0].maglev: is empty: write a mapping with the fields size, seed",
		},
		{
			"maglev is a number", "name: s1", "name: s1\n    maglev: 1009",
			"f.yaml:12: streams[0].maglev: is \"1009\": write a mapping with the fields size, seed",
		},
		{
			"table of no prime size", "name: s1", "name: s1\n    maglev: {size: 1000}",
			"f.yaml:12: streams[0].maglev.size: is 1000, which is no prime number: write 997 or 1009",
		},
		{
			"table of a square size", "name: s1", "name: s1\n    maglev: {size: 10201}",
			"f.yaml:12: streams[0].maglev.size: is 10201, which is no prime number: write 10193 or 10211",
		},
		{
			"smallest table of no prime size", "name: s1", "name: s1\n    maglev: {size: 102}",
			"f.yaml:12: streams[0].maglev.size: is 102, which is no prime number: write 101 or 103",
		},
		{
			"largest table of no prime size", "name: s1", "name: s1\n    maglev: {size: 131070}",
			"f.yaml:12: streams[0].maglev.size: is 131070, which is no prime number: write 131063 or 131071",
		},
		{
			"table too small", "name: s1", "name: s1\n    maglev: {size: 97}",
			"f.yaml:12: streams[0].maglev.size: is \"97\": write a whole number between 101 and 131071",
		},
		{
			"table too large", "name: s1", "name: s1\n    maglev: {size: 131101}",
			"f.yaml:12: streams[0].maglev.size: is \"131101\": write a whole number between 101 and 131071",
		},
		{
			"seed 0", "name: s1", "name: s1\n    maglev: {seed: 0}",
			"f.yaml:12: streams[0].maglev.seed: is \"0\": write a whole number between 1 and 4294967295",
		},
		{
			"seed too large", "name: s1", "name: s1\n    maglev: {seed: 4294967296}",
			"f.yaml:12: streams[0].maglev.seed: is \"4294967296\": write a whole number between 1 and 4294967295",
		},

		// Targets
		{
			"target without addresses", "ips: [172.16.1.1]", "ips: []",
			"f.yaml:15: streams[0].targets[0].ips: is an empty list: write its addresses, or remove the target",
		},
		{
			"target without a name", "name: t1, ", "",
			"f.yaml:15: streams[0].targets[0].name: is missing: write a name for the target",
		},
		{"target is a VIP", "172.16.1.1", "20.0.0.1", "f.yaml:15: streams[0].targets[0].ips[0]: is 20.0.0.1, which lies in " +
			"the VIP 20.0.0.1/32: write the target's own address"},
		{"target address twice", "172.16.1.2", "172.16.1.1", "f.yaml:16: streams[0].targets[1].ips[0]: target address " +
			"172.16.1.1 appears twice, first in line 15: remove one of them or change it"},
		{"two addresses of a family", "[172.16.1.1]", "[172.16.1.1, 172.16.1.3]", "f.yaml:15: " +
			"streams[0].targets[0].ips[1]: is a second IPv4 address: a target has one of a family, make a second target of it"},
		{
			"target address is a prefix", "172.16.1.2", "172.16.1.2/32",
			"f.yaml:16: streams[0].targets[1].ips[0]: is \"172.16.1.2/32\", which has a prefix length: write 172.16.1.2",
		},
		{
			"target without an address that is checked", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, families: ipv6}",
			"f.yaml:15: streams[0].targets[0].ips: has no IPv6 address, and the stream's check.families is ipv6, so that " +
				"nothing would check it: add one, or write families: both\nf.yaml:16: streams[0].targets[1].ips: has no IPv6 " +
				"address, and the stream's check.families is ipv6, so that nothing would check it: add one, or write families: " +
				"both",
		},
		{
			"terminating is no boolean", "ips: [172.16.1.1]", "ips: [172.16.1.1], terminating: yes",
			"f.yaml:15: streams[0].targets[0].terminating: is \"yes\": write true or false",
		},

		// Several problems, in file order
		{
			"several", good, strings.NewReplacer("name: gw4", "name: g 4", "[20.0.0.1/32]", "[20.0.0.9/32]", "port: 5000",
				"port: x", "trench-a", `""`).Replace(good),
			"f.yaml:1: trench: is empty: write 1 to 60 characters out of A-Z a-z 0-9 _ . -\n" +
				"f.yaml:6: attractor.gateways[0].name: is \"g 4\": write 1 to 60 characters out of A-Z a-z 0-9 _ . -\n" +
				"f.yaml:12: streams[0].vips[0]: VIP 20.0.0.9/32 is not one of the attractor: add it to attractor.vips or remove " +
				"it here\n" +
				"f.yaml:13: streams[0].check.tcp.port: is \"x\": write a whole number between 1 and 65535",
		},
	}
	if _, err := Parse("f.yaml", []byte(good), trench.DefaultDefaults()); err != nil {
		t.Fatalf("the file to spoil is not good: %v", err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(good, tt.old) {
				t.Fatalf("%q is not in the file", tt.old)
			}
			c, err := Parse("f.yaml", []byte(strings.Replace(good, tt.old, tt.new, 1)), trench.DefaultDefaults())
			var errs *Errors
			if !errors.As(err, &errs) || c != nil {
				t.Fatalf("got %+v, %v", c, err)
			}
			if got := err.Error(); got != tt.want {
				t.Fatalf("\n got %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestGoodVariants(t *testing.T) {
	tests := []struct{ name, old, new string }{
		{"no streams", good[strings.Index(good, "streams:"):], ""},
		{"no gateways", good[strings.Index(good, "  gateways:"):strings.Index(good, "streams:")], ""},
		{"nothing at all", good, "trench: a\nattractor: {name: a, vips: []}\nstreams: []\n"},
		{"JSON", good, `{"trench": "a", "attractor": {"name": "a", "vips": ["20.0.0.1/32"]}}`},
		{"a name that is a number", "name: s1", "name: 12"},
		{"a byte order mark and CR LF", good, "\ufeff" + strings.ReplaceAll(good, "\n", "\r\n")},
		{
			"an alias for a list", good,
			strings.NewReplacer(`[20.0.0.1/32, "2000::1/128"]`, `&vips [20.0.0.1/32, "2000::1/128"]`, "vips: [20.0.0.1/32]",
				"vips: *vips").Replace(good),
		},
		{"document marks", good, "---\n" + good + "...\n"},
		{"a short interval without a timeout", "{tcp: {port: 5000}}", "{tcp: {port: 5000}, interval: 100ms}"},
		{"no check and no targets", good[strings.Index(good, "    check:"):], ""},
		{"no check and an empty list of targets", good[strings.Index(good, "    check:"):], "    targets: []\n"},
		{
			"the same target in two streams", good,
			good + "  - {name: s2, vips: [20.0.0.1/32], check: {tcp: {port: 1}}, targets: [{name: t1, ips: [172.16.1.1]}]}\n",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Parse("f.yaml", []byte(strings.Replace(good, tt.old, tt.new, 1)), trench.DefaultDefaults())
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range c.Streams {
				if c := s.Check; c.Timeout > c.Interval || c.FastInterval != c.Interval {
					t.Errorf("timeout %v, fast interval %v, interval %v", c.Timeout, c.FastInterval, c.Interval)
				}
			}
		})
	}
}

func TestWantedStatus(t *testing.T) {
	for _, tt := range []struct {
		status   string
		wanted   []int
		unwanted []int
	}{
		{"200", []int{200}, []int{100, 199, 201, 404, 600}},
		{"200-399", []int{200, 204, 302, 399}, []int{199, 400, 503}},
		{"200-299,404", []int{200, 299, 404}, []int{300, 403, 405}},
		{"503,200-204,404", []int{503, 200, 203, 204, 404}, []int{205, 502}},
		{"", nil, []int{0, 200}},
	} {
		c := trench.HTTPCheck{Status: tt.status}
		for _, n := range tt.wanted {
			if !c.Wants(n) {
				t.Errorf("%q does not want %d", tt.status, n)
			}
		}
		for _, n := range tt.unwanted {
			if c.Wants(n) {
				t.Errorf("%q wants %d", tt.status, n)
			}
		}
	}
}

func TestUnreadableFile(t *testing.T) {
	dir := t.TempDir()
	if _, err := Read(dir, trench.DefaultDefaults()); err == nil || !strings.Contains(err.Error(),
		"is not a regular file") {
		t.Errorf("a directory: %v", err)
	}
	if _, err := Read(dir+"/missing.yaml", trench.DefaultDefaults()); !errors.Is(err, os.ErrNotExist) ||
		!strings.Contains(err.Error(), "missing.yaml") {
		t.Errorf("a missing file: %v", err)
	}
}

func TestProblemsAreBounded(t *testing.T) {
	var b strings.Builder
	b.WriteString("trench: a\nattractor:\n  name: a\n  vips: &v\n")
	for range 1000 {
		b.WriteString("    - 20.0.0.1/32\n")
	}
	b.WriteString("streams:\n")
	for range 1000 {
		b.WriteString("  - {name: s, vips: *v, check: {tcp: {port: 1}}}\n")
	}
	_, err := Parse("f.yaml", []byte(b.String()), trench.DefaultDefaults())
	var errs *Errors
	if !errors.As(err, &errs) || len(errs.Problems) != maxProblems || !errs.More {
		t.Fatalf("got %v", err)
	}
	if got := err.Error(); !strings.HasSuffix(got, "\nf.yaml: there are more problems than these 100") {
		t.Errorf("got %s", got[strings.LastIndex(got, "\n")+1:])
	}
}

func TestTenThousandVIPsAndTargets(t *testing.T) {
	c, err := Parse("f.yaml", large(10_000), trench.DefaultDefaults())
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Attractor.VIPs) != 10_000 || len(c.Streams[0].Targets) != 10_000 {
		t.Fatalf("got %d VIPs, %d targets", len(c.Attractor.VIPs), len(c.Streams[0].Targets))
	}
}

func large(n int) []byte {
	var vips, targets strings.Builder
	v, a := netip.MustParseAddr("20.0.0.0"), netip.MustParseAddr("172.16.0.0")
	for i := range n {
		v, a = v.Next(), a.Next()
		fmt.Fprintf(&vips, "    - %s/32\n", v)
		fmt.Fprintf(&targets, "      - {name: t%d, ips: [%s]}\n", i, a)
	}
	return []byte("trench: a\nattractor:\n  name: a\n  vips: &vips\n" + vips.String() +
		"streams:\n  - name: s\n    vips: *vips\n    check: {tcp: {port: 1}}\n    targets:\n" + targets.String())
}

func BenchmarkParse10000(b *testing.B) {
	data := large(10_000)
	for b.Loop() {
		if _, err := Parse("f.yaml", data, trench.DefaultDefaults()); err != nil {
			b.Fatal(err)
		}
	}
}

// The addresses lie in a wide VIP (first, inner and last address), or outside next to it. Further
// VIPs sort before and after the wide one.
func TestAddressesInsideAWideVIP(t *testing.T) {
	wide := strings.Replace(good, `vips: [20.0.0.1/32, "2000::1/128"]`,
		`vips: [10.0.0.1/32, 20.0.0.0/24, 30.0.0.0/16, "2000::/64", "3000::1/128"]`, 1)
	wide = strings.Replace(wide, "vips: [20.0.0.1/32]", "vips: [20.0.0.0/24]", 1)
	places := map[string][2]string{
		"attractor.gateways[0].address": {"169.254.100.150", `"%s"`},
		"attractor.gateways[1].address": {"fd00:100::150", `"%s"`},
		"streams[0].targets[0].ips[0]":  {"172.16.1.1", `"%s"`},
		"streams[0].check.source[0]":    {"{tcp: {port: 5000}}", `{tcp: {port: 5000}, source: ["%s"]}`},
	}
	for field, place := range places {
		for address, inside := range map[string]string{
			"20.0.0.0": "20.0.0.0/24", "20.0.0.77": "20.0.0.0/24", "20.0.0.255": "20.0.0.0/24", "30.0.7.9": "30.0.0.0/16",
			"2000::7:7":      "2000::/64",
			"19.255.255.255": "", "20.0.1.0": "", "10.0.0.2": "", "2000:0:0:1::": "", "1fff::1": "",
		} {
			text := strings.Replace(wide, place[0], fmt.Sprintf(place[1], address), 1)
			_, err := Parse("f", []byte(text), trench.DefaultDefaults())
			want := fmt.Sprintf("%s: is %s, which lies in the VIP %s:", field, address, inside)
			switch {
			case inside == "" && err != nil:
				t.Errorf("%s %s: got %v, want none", field, address, err)
			case inside != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("%s %s: got %v, want %q", field, address, err, want)
			}
		}
	}
}

// Both the file and the flag reject names that BIRD cannot quote.
func TestInterfaceNames(t *testing.T) {
	t.Parallel()
	for name, ok := range map[string]bool{
		"ext-vlan": true, "eth0.100": true, "9_a": true, "exactly15chars_": true, "": false, "16-characters-xx": false,
		".": false, "..": false, "e'th0": false, `e"th0`: false, "eth*": false, "a+b": false, "a@b": false, "a%b": false,
		"a b": false, "a/b": false, "a:1": false, "a\nb": false, "ä": false,
	} {
		d := trench.DefaultDefaults()
		d.Interface = name
		if err := d.Validate(); (err == nil) != ok {
			t.Errorf("default %q: %v", name, err)
		}
		file := fmt.Sprintf("trench: a\nattractor:\n  name: a\n  interface: %q\n", name)
		_, err := Parse("", []byte(file), trench.DefaultDefaults())
		if refused := err != nil && strings.Contains(err.Error(), "interface"); refused == ok {
			t.Errorf("interface %q in the file: %v", name, err)
		}
	}
}
