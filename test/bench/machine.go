package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// unknown is the value of machine properties that cannot be read.
const unknown = "unknown"

// describeMachine reads the properties of the machine. A property that cannot be read is
// "unknown" and does not prevent the measurement.
func describeMachine(ctx context.Context, binaries string) Machine {
	m := Machine{
		Date: time.Now(), Command: append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...), Cores: runtime.NumCPU(),
		CPU: unknown, Kernel: unknown, Go: runtime.Version(), BIRD: unknown, Commit: unknown,
	}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		m.CPU = cpuModel(string(b))
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(b))
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, lab.BIRD(), "--version").CombinedOutput(); err == nil {
		m.BIRD = strings.TrimPrefix(strings.TrimSpace(string(out)), "BIRD version ")
	}
	out, err := exec.CommandContext(ctx, "git", "-C", binaries, "describe", "--always", "--exclude=*", "--abbrev=12",
		"--dirty=+").Output()
	if err == nil {
		m.Commit = strings.TrimSpace(string(out))
	}
	return m
}

// cpuModel finds the processor in /proc/cpuinfo.
func cpuModel(info string) string {
	for line := range strings.Lines(info) {
		if key, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return unknown
}

// loadAverage returns the load of the machine over 1, 5 and 15 minutes.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	words := strings.Fields(string(b))
	if err != nil || len(words) < 3 {
		return unknown
	}
	return strings.Join(words[:3], " ")
}
