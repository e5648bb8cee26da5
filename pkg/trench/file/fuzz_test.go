package file

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v4"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

var goodName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,60}$`)

// distinct fails if two elements have the same key.
func distinct[T any, K comparable](t *testing.T, what string, list []T, key func(T) K) {
	t.Helper()
	seen := make(map[K]bool)
	for _, x := range list {
		if seen[key(x)] {
			t.Fatalf("%s %v appears twice", what, key(x))
		}
		seen[key(x)] = true
	}
}

func wellNamed(t *testing.T, what, name string) {
	t.Helper()
	if !goodName.MatchString(name) {
		t.Fatalf("%s has the name %q", what, name)
	}
}

func between[T ~int | ~int64 | ~uint8](t *testing.T, what string, x, lo, hi T) {
	t.Helper()
	if x < lo || x > hi {
		t.Fatalf("%s is %v, outside %v…%v", what, x, lo, hi)
	}
}

// host fails if no packet can be sent to the address, or if it lies in a VIP.
func host(t *testing.T, what string, a netip.Addr, vips []vip.VIP) {
	t.Helper()
	if !a.IsValid() || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() ||
		(a.Is6() && a.IsLinkLocalUnicast()) {
		t.Fatalf("%s has the address %s", what, a)
	}
	for _, v := range vips {
		if v.Prefix().Contains(a) {
			t.Fatalf("%s has the address %s, which lies in the VIP %s", what, a, v)
		}
	}
}

// checkConfig checks the guarantees of a Config (the documentation of its types, and
// docs/configuration.md), one by one and as plainly as possible.
func checkConfig(t *testing.T, c *trench.Config) {
	t.Helper()
	a := c.Attractor
	wellNamed(t, "the trench", c.Trench)
	wellNamed(t, "the attractor", a.Name)
	between(t, "the number of VIPs", len(a.VIPs), 0, trench.MaxVIPs)
	for i, v := range a.VIPs {
		p := v.Prefix()
		if !p.IsValid() || p.Bits() == 0 || p.Masked() != p || p.Addr().Is4In6() {
			t.Fatalf("VIP %s", v)
		}
		for _, w := range a.VIPs[:i] {
			if v.Overlaps(w) {
				t.Fatalf("VIPs %s and %s overlap", v, w)
			}
		}
	}
	distinct(t, "gateway", a.Gateways, func(g trench.Gateway) string { return g.Name })
	distinct(t, "gateway address", a.Gateways, func(g trench.Gateway) netip.Addr { return g.Address })
	var static *trench.BFD
	for _, g := range a.Gateways {
		wellNamed(t, "a gateway", g.Name)
		if g.Interface == "" {
			host(t, g.Name, g.Address, a.VIPs)
		} else if g.Address.IsValid() || g.Multihop > 0 {
			t.Fatalf("unnumbered gateway %+v", g)
		}
		if g.Name == "BFD" || g.Address.IsLoopback() {
			t.Fatalf("gateway %+v", g)
		}
		if b := g.BFD; b != nil {
			between(t, "minTx", b.MinTx, 10*time.Millisecond, time.Minute)
			between(t, "minRx", b.MinRx, 10*time.Millisecond, time.Minute)
			between(t, "the multiplier", b.Multiplier, 1, 255)
		}
		if g.Protocol == trench.Static {
			if g != (trench.Gateway{Name: g.Name, Address: g.Address, Protocol: trench.Static, BFD: g.BFD}) {
				t.Fatalf("static gateway %+v", g)
			}
			if g.BFD != nil && static != nil && *static != *g.BFD {
				t.Fatalf("static gateways with the BFD parameters %+v and %+v", *static, *g.BFD)
			}
			if static == nil {
				static = g.BFD
			}
			continue
		}
		between(t, "the local port", g.LocalPort, 1, 65535)
		between(t, "the remote port", g.RemotePort, 1, 65535)
		between(t, "the local AS number", g.LocalASN, 1, 4294967294)
		between(t, "the remote AS number", g.RemoteASN, 1, 4294967294)
		for _, asn := range []int64{g.LocalASN, g.RemoteASN} {
			if slices.Contains([]int64{0, 23456, 65535, 4294967295}, asn) {
				t.Fatalf("gateway %s has AS %d", g.Name, asn)
			}
		}
		between(t, "the keepalive time", g.KeepaliveTime, 0, g.HoldTime/3)
		between(t, "the hold time", g.HoldTime, 3*time.Second, 65535*time.Second)
		if g.HoldTime%time.Second != 0 || g.PasswordFile != "" && !filepath.IsAbs(g.PasswordFile) {
			t.Fatalf("gateway %+v", g)
		}
	}
	distinct(t, "stream", c.Streams, func(s trench.Stream) string { return s.Name })
	for _, s := range c.Streams {
		wellNamed(t, "a stream", s.Name)
		distinct(t, "VIP", s.VIPs, func(v vip.VIP) vip.VIP { return v })
		if len(s.VIPs) == 0 || s.MinReady < 1 {
			t.Fatalf("stream %+v", s)
		}
		matches(t, s.Match)
		between(t, "the drain time", s.DrainTime, 0, time.Hour)
		between(t, "the seed", int64(s.Maglev.Seed), 1, math.MaxUint32)
		if between(t, "the size", int64(s.Maglev.Size), 101, 131071); !big.NewInt(int64(s.Maglev.Size)).ProbablyPrime(0) {
			t.Fatalf("a table of %d entries", s.Maglev.Size)
		}
		for _, v := range s.VIPs {
			if !slices.Contains(a.VIPs, v) {
				t.Fatalf("stream %s has VIP %s, the attractor has not", s.Name, v)
			}
		}
		if s.Check != (trench.Check{}) || len(s.Targets) > 0 {
			checks(t, s.Check, a.VIPs)
		}
		distinct(t, "target", s.Targets, func(x trench.Target) string { return x.Name })
		var ips []netip.Addr
		for _, x := range s.Targets {
			wellNamed(t, "a target", x.Name)
			between(t, "the number of addresses", len(x.IPs), 1, 2)
			distinct(t, "family", x.IPs, vip.FamilyOf)
			checked := false
			for _, ip := range x.IPs {
				host(t, x.Name, ip, a.VIPs)
				checked = checked || s.Check.Families == trench.BothFamilies || (s.Check.Families == trench.OnlyIPv4) == ip.Is4()
			}
			if !checked {
				t.Fatalf("nothing checks target %s of stream %s", x.Name, s.Name)
			}
			ips = append(ips, x.IPs...)
		}
		distinct(t, "target address", ips, func(a netip.Addr) netip.Addr { return a })
	}
}

var (
	goodPath   = regexp.MustCompile(`^/[!-~]*$`)
	goodStatus = regexp.MustCompile(`^[2-5][0-9][0-9](-[2-5][0-9][0-9])?(,[2-5][0-9][0-9](-[2-5][0-9][0-9])?)*$`)
	goodASCII  = regexp.MustCompile(`^[!-~]*$`)
)

// matches fails if a match violates its guarantees.
func matches(t *testing.T, match []trench.Match) {
	t.Helper()
	var ports []string
	for _, x := range match {
		if len(x.Protocols) == 0 || len(x.Ports) == 0 {
			t.Fatalf("match %+v", x)
		}
		for _, protocol := range x.Protocols {
			if protocol != "tcp" && protocol != "udp" && protocol != "sctp" {
				t.Fatalf("protocol %q", protocol)
			}
			for _, port := range x.Ports {
				between(t, "the port", int(port), 1, 65535)
				ports = append(ports, fmt.Sprint(protocol, port))
			}
		}
	}
	distinct(t, "port", ports, func(s string) string { return s })
	between(t, "the number of ports", len(ports), 0, 100)
}

// checks fails if a check, or one of its members, violates its guarantees.
func checks(t *testing.T, c trench.Check, vips []vip.VIP) {
	t.Helper()
	between(t, "the warmup", c.Warmup, 0, time.Hour)
	if c.Kind() != "any" && c.Kind() != "all" {
		singleCheck(t, c, vips)
		return
	}
	members, anyPasses := c.Members()
	between(t, "the number of members", len(members), 1, trench.MaxMembers)
	if anyPasses != (c.Kind() == "any") || anyPasses == (c.All != trench.Members{}) {
		t.Fatalf("check %+v", c)
	}
	for i, member := range members {
		singleCheck(t, member, vips)
		if slices.Contains(members[:i], member) || member.Families != c.Families || member.Via != c.Via ||
			member.Sources != c.Sources {
			t.Fatalf("member %+v of %+v", member, c)
		}
	}
	// The whole check has the same bounds.
	c.TCP.Port, c.Any, c.All = 1, trench.Members{}, trench.Members{}
	singleCheck(t, c, vips)
}

// singleCheck fails if a check of one kind violates its guarantees.
func singleCheck(t *testing.T, c trench.Check, vips []vip.VIP) {
	t.Helper()
	kinds := 0
	for _, port := range []uint16{
		c.TCP.Port, c.HTTP.Port, c.GRPC.Port, c.UDP.Port, c.DNS.Port, c.NTP.Port, c.SCTP.Port,
	} {
		if port != 0 {
			kinds++
		}
	}
	if _, err := dnsmessage.NewName(strings.TrimSuffix(c.DNS.Name, ".") + "."); c.DNS.Port != 0 && err != nil {
		t.Fatal(err)
	}
	if c.UDP.Port != 0 && (len(trench.Payload(c.UDP.Send)) == 0 || len(c.UDP.Send) > 1000) {
		t.Fatalf("%+v", c.UDP)
	}
	if _, err := regexp.Compile(c.DNS.Answer); err != nil || c.NTP.Port != 0 && c.NTP.MaxDistance == 0 {
		t.Fatalf("%+v", c)
	}
	if kinds != 1 || c.HTTP.Port == 0 && c.HTTP != (trench.HTTPCheck{}) || c.GRPC.Port == 0 &&
		c.GRPC != (trench.GRPCCheck{}) {
		t.Fatalf("check %+v", c)
	}
	between(t, "the interval", c.Interval, 10*time.Millisecond, time.Hour)
	between(t, "the fast interval", c.FastInterval, 10*time.Millisecond, c.Interval)
	between(t, "the timeout", c.Timeout, time.Millisecond, c.Interval)
	between(t, "rise", c.Rise, 1, 100)
	between(t, "fall", c.Fall, 1, 100)
	between(t, "the families", c.Families, 0, 2)
	between(t, "the path", c.Via, 0, 2)
	for _, source := range c.Sources {
		if source.IsValid() {
			host(t, "the source", source, vips)
		}
	}
	if a, b := c.Sources[0], c.Sources[1]; b.IsValid() && a.Is4() == b.Is4() || b.IsValid() && !a.IsValid() {
		t.Fatalf("sources %s and %s", a, b)
	}
	if h := c.HTTP; h.Port != 0 {
		if _, err := url.Parse("http://10.0.0.1" + h.Path); err != nil || !goodPath.MatchString(h.Path) {
			t.Fatalf("path %q: %v", h.Path, err)
		}
		if _, err := regexp.Compile(h.Body); err != nil || !goodStatus.MatchString(h.Status) ||
			!goodASCII.MatchString(h.Host) {
			t.Fatalf("%+v: %v", h, err)
		}
		if _, err := http.NewRequest(http.MethodGet, "http://"+h.Host+"/", nil); h.Host != "" && err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []trench.TLSCheck{c.HTTP.TLS, c.GRPC.TLS} {
		if !s.On && s != (trench.TLSCheck{}) || s.CAFile != "" && (!filepath.IsAbs(s.CAFile) || s.Insecure) ||
			!goodASCII.MatchString(s.ServerName) || (s.CertFile == "") != (s.KeyFile == "") {
			t.Fatalf("%+v", s)
		}
	}
	if !goodASCII.MatchString(c.GRPC.Service) {
		t.Fatalf("%+v", c.GRPC)
	}
}

// checkErrors checks that the errors of a rejected file take one line per problem, in file order,
// without control characters.
func checkErrors(t *testing.T, err error, data []byte) {
	t.Helper()
	var errs *Errors
	if !errors.As(err, &errs) || len(errs.Problems) == 0 || len(errs.Problems) > maxProblems {
		t.Fatalf("got %T %v", err, err)
	}
	last := lines(data)
	for i, p := range errs.Problems {
		if p.File != "f" || p.Line < 1 || p.Line > last || p.Column < 1 || p.Message == "" {
			t.Fatalf("%+v, and the file has %d lines", p, last)
		}
		if i > 0 && p.Line < errs.Problems[i-1].Line {
			t.Fatalf("%s follows %s", p, errs.Problems[i-1])
		}
		if text := p.String(); !utf8.ValidString(text) ||
			strings.ContainsFunc(text, func(c rune) bool { return !unicode.IsPrint(c) }) {
			t.Fatalf("%q holds what cannot be shown", text)
		}
	}
}

// FuzzParse checks that a file either is rejected with an error or results in a configuration
// with all guarantees, and that this configuration is unchanged after it is written and parsed
// again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte(every))
	f.Add([]byte("a: &a [*a]"))
	reference, err := os.ReadFile("testdata/reference.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(reference)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("f", data, trench.DefaultDefaults())
		if (c == nil) == (err == nil) {
			t.Fatalf("got %v, %v", c, err)
		}
		if err != nil {
			checkErrors(t, err, data)
			return
		}
		checkConfig(t, c)
		text := Marshal(c)
		again, err := Parse("f", text,
			trench.Defaults{
				Interface: "eth7", LocalASN: 1, RemoteASN: 2, LocalPort: 3, RemotePort: 4,
				HoldTime: 5 * time.Second,
			})
		if err != nil {
			t.Fatalf("a marshaled configuration is refused: %v\n%s", err, text)
		}
		equate := cmpopts.EquateComparable(netip.Addr{}, vip.VIP{}, trench.Members{})
		if diff := cmp.Diff(c, again, equate, cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("marshaled, it differs: %s\n%s", diff, text)
		}
	})
}

// FuzzGateway varies the values of one gateway, not the syntax of the file.
func FuzzGateway(f *testing.F) {
	f.Add("a", "10.0.0.1", "8103", "179", "3s", "300ms", "3", "/etc/key")
	f.Add("BFD", "fd00::1", "4200000000", "0", "90", "10ms", "256", "key")
	f.Add(strings.Repeat("x", 61), "20.0.0.1", "23456", "65536", "2.5s", "1h", "-1", "/")
	f.Add("a b", "::ffff:10.0.0.1", "65535", "0x50", "65536s", "9ms", "0", "//")
	f.Add("ä", "fe80::1%eth0", "4294967296", "1e3", "3000ms", "1m", "3.0", "/a\nb")
	f.Fuzz(func(t *testing.T, name, address, asn, port, hold, interval, multiplier, password string) {
		file, err := yaml.Marshal(map[string]any{"trench": "t", "attractor": map[string]any{
			"name": "a", "vips": []string{"20.0.0.1/32", "2000::1/128"},
			"gateways": []any{map[string]any{
				"name": name, "address": address, "localASN": asn, "remotePort": port, "holdTime": hold,
				"bfd": map[string]any{"minTx": interval, "multiplier": multiplier}, "passwordFile": password,
			}},
		}})
		if err != nil {
			return // not valid text
		}
		c, err := Parse("f", file, trench.DefaultDefaults())
		if err != nil {
			checkErrors(t, err, file)
			return
		}
		checkConfig(t, c)
		if g := c.Attractor.Gateways[0]; g.Name != name || g.PasswordFile != password || fmt.Sprint(g.LocalASN) != asn ||
			fmt.Sprint(g.RemotePort) != port {
			t.Fatalf("%s gave %+v", file, g)
		}
	})
}

// FuzzCheck varies the values of one check.
func FuzzCheck(f *testing.F) {
	f.Add("http", "8080", "/healthz?full=1", "example.org:8443", "200-399,404", "^ok$", "ipv4", "172.16.0.1", "100ms",
		"30s")
	f.Add("grpc", "1", "pkg.Service", "fd00::1", "200", "(", "both", "::1", "1s", "0s")
	f.Add("http", "0", "/%zz#", "[fd00::1]:80", "399-200", `(a)\1`, "ipv6", "ff02::1", "9ms", "2h")
	f.Add("http", "65536", "//a\r\nb: c", "a\r\nb: c", "200,", strings.Repeat("a{1000}", 3), "IPv4", "20.0.0.1", "2s", "0")
	f.Add("any http", "8080", "/", "h", "200", "", "both", "172.16.0.1", "100ms", "30s")
	f.Add("all grpc", "8080", "s", "h", "200", "", "both", "172.16.0.1", "100ms", "30s")
	f.Add("any any", "8080", "s", "h", "200", "", "both", "172.16.0.1", "100ms", "30s")
	f.Add("tcp", "80", "", "ä", "9999", strings.Repeat("ä", 1001), "", "fe80::1%lo", "-1s", "-0s")
	f.Fuzz(func(t *testing.T, kind, port, path, host, status, body, families, source, fast, drain string) {
		is := map[string]any{"port": port}
		group, member, isMember := strings.Cut(kind, " ")
		if isMember {
			kind = member
		}
		switch kind {
		case "http":
			is["path"], is["host"], is["status"], is["body"] = path, host, status, body
			is["tls"] = map[string]any{"serverName": host, "caFile": path}
		case "grpc":
			is["service"] = path
			is["tls"] = map[string]any{"serverName": host, "insecure": body}
		}
		check := map[string]any{kind: is, "fastInterval": fast}
		if isMember {
			check = map[string]any{group: []any{check, map[string]any{"tcp": map[string]any{"port": 1}}}}
		}
		check["families"], check["source"] = families, []string{source}
		file, err := yaml.Marshal(map[string]any{
			"trench": "t", "attractor": map[string]any{"name": "a", "vips": []string{"20.0.0.1/32"}},
			"streams": []any{map[string]any{
				"name": "s", "vips": []string{"20.0.0.1/32"}, "drainTime": drain,
				"check": check,
			}},
		})
		if err != nil {
			return // not valid text
		}
		c, err := Parse("f", file, trench.DefaultDefaults())
		if err != nil {
			checkErrors(t, err, file)
			return
		}
		checkConfig(t, c)
		members, _ := c.Streams[0].Check.Members()
		if isMember && len(members) != 2 {
			t.Fatalf("%s gave %+v", file, members)
		}
		if h := members[0].HTTP; kind == "http" &&
			(h.Path != path || h.Host != host || h.Status != status || h.Body != body || h.TLS.CAFile != path) {
			t.Fatalf("%s gave %+v", file, h)
		}
	})
}
