package lab

import (
	"maps"
	"os/exec"
	"slices"
	"testing"
)

// debian maps the programs that tests need to their Debian packages.
var debian = map[string]string{
	"bird":                    "bird2",
	"chromium":                "chromium",
	"chronyd":                 "chrony",
	"curl":                    "curl",
	"gobgpd":                  "gobgpd",
	"ip":                      "iproute2",
	"mkdocs":                  "mkdocs-material",
	"mmdebstrap":              "mmdebstrap",
	"nft":                     "nftables",
	"nginx":                   "nginx-light",
	"openssl":                 "openssl",
	"prometheus":              "prometheus",
	"prometheus-alertmanager": "prometheus-alertmanager",
	"promtool":                "prometheus",
	"systemd-analyze":         "systemd",
	"unbound":                 "unbound",
}

// DebianPackages lists the packages of the programs that [Need] knows.
func DebianPackages() []string { return slices.Collect(maps.Values(debian)) }

// Need skips a test if the machine lacks one of the programs, and names its Debian package.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			Skip(t, Lacks(t, program))
		}
	}
}

// Lacks returns the text about a missing program.
func Lacks(t testing.TB, program string) string {
	t.Helper()
	if debian[program] == "" {
		t.Fatalf("the Debian package of %s is not in package lab", program)
	}
	return "missing: " + program + " (Debian: apt-get install " + debian[program] + ")"
}
