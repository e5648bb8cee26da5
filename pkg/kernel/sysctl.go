package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const ipv4Conf = "/proc/sys/net/ipv4/conf"

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
