package main

import (
	"os"
	"strings"

	"github.com/vipgate/vipgate/test/machine"
)

// loadAverage returns the load of the machine over 1, 5 and 15 minutes.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	words := strings.Fields(string(b))
	if err != nil || len(words) < 3 {
		return machine.Unknown
	}
	return strings.Join(words[:3], " ")
}
