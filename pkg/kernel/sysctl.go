package kernel

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	ipv4Conf       = "/proc/sys/net/ipv4/conf"
	ipv6Forwarding = "/proc/sys/net/ipv6/conf/all/forwarding"
)

// sysctls returns an error while a kernel parameter has the kernel drop packets that
// arrive for VIPs of a family. It names the command that sets the parameter.
//
// A pod in which forwarding is off from the start delivers VIPs itself, or past the
// kernel: only forwarding that was on and is switched off is an error.
func (p *pass) sysctls(f vip.Family) error {
	external := p.policy.o.External
	if external == "" {
		return nil
	}
	path := filepath.Join(ipv4Conf, external, "forwarding")
	if f == vip.IPv6 {
		path = ipv6Forwarding // of one interface it only decides about router advertisements
	}
	switch value := readSysctl(path); {
	case value == "1":
		p.forwarded[f] = true
	case value == "0" && p.forwarded[f]:
		if f == vip.IPv4 && readSysctl(ipv4Conf+"/all/forwarding") == "0" {
			path = "/proc/sys/net/ipv4/ip_forward"
		}
		return fmt.Errorf("%s packets are not forwarded: run %s", f, sysctlCommand(path, "1"))
	}
	own := filepath.Join(ipv4Conf, external, "rp_filter")
	// The values are single digits, so that their text orders them.
	if f == vip.IPv4 && max(readSysctl(ipv4Conf+"/all/rp_filter"), readSysctl(own)) == "1" && !defaultRouteVia(external) {
		return fmt.Errorf("strict reverse path filtering drops packets that arrive on %s: run %s", external, sysctlCommand(own, "2"))
	}
	return nil
}

func sysctlCommand(path, value string) string {
	name := strings.TrimPrefix(path, "/proc/sys/")
	if !strings.Contains(name, ".") { // as the name of an interface can
		name = strings.ReplaceAll(name, "/", ".")
	}
	return "sysctl -w " + name + "=" + value
}

// defaultRouteVia reports whether packets without a mark leave for the world by an
// interface: strict reverse path filtering then lets packets from there in.
func defaultRouteVia(name string) bool {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return false
	}
	h, err := newHandle()
	if err != nil {
		return false
	}
	defer h.Close()
	routes, err := h.RouteGet(net.IPv4(192, 0, 2, 1)) // TEST-NET-1, RFC 5737
	return err == nil && len(routes) > 0 && routes[0].LinkIndex == i.Index
}

// reversePathProblems names the interfaces on which strict reverse path
// filtering drops traffic to VIPs. The larger of the values for "all" and for
// the interface counts (ip-sysctl, rp_filter).
func reversePathProblems() []string {
	if readSysctl(ipv4Conf+"/all/rp_filter") == "2" {
		return nil
	}
	all := readSysctl(ipv4Conf + "/all/rp_filter")
	paths, err := filepath.Glob(ipv4Conf + "/*/rp_filter")
	if err != nil {
		return nil
	}
	var problems []string
	for _, path := range paths {
		name := filepath.Base(filepath.Dir(path))
		value := readSysctl(path)
		if name == "all" || name == "default" || name == "lo" || value == "2" || (value != "1" && all != "1") {
			continue
		}
		problems = append(problems, fmt.Sprintf("interface %s filters by strict reverse path: VIP traffic that enters through it is dropped; set net.ipv4.conf.%s.rp_filter to 2, or it and net.ipv4.conf.all.rp_filter to 0", name, name))
	}
	return problems
}

// readSysctl returns "" for what cannot be read.
func readSysctl(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
