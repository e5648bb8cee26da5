package main

import (
	"strings"
	"testing"
)

func TestFlagsThatCannotWorkAreRefused(t *testing.T) {
	for line, want := range map[string]string{
		"--log-level=loud":                            "--log-level: ",
		"--health-port=0":                             "--health-port=0: probes need",
		"--ready-timeout=999h":                        "--ready-timeout=999h0m0s: at most 1h0m0s",
		"--readiness-dir=/d --readiness-max-age=999h": "--readiness-max-age=999h0m0s: at most 24h0m0s",
		"--bird-executable=/etc":                      "--bird-executable=/etc: ",
		"--bird-executable=/etc/passwd":               "permission denied: install BIRD, or name its path",
		"--identity=files --svid-dir=/etc/passwd":     "not a directory; name the directory with tls.crt",
		"--rule-priority=32764":                       "--rule-priority, --mark: rule priority 32764",
	} {
		t.Run(line, func(t *testing.T) {
			if _, err := readinessOptions(t, nil, strings.Fields(line)...); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one that says %q", err, want)
			}
		})
	}
}
