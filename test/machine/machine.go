// Package machine describes the machine, the commit and the time of a measurement.
package machine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Unknown is the value of properties that cannot be read.
const Unknown = "unknown"

// Machine describes the machine, the date and the software of a run.
type Machine struct {
	Date    time.Time `json:"date"`
	Command []string  `json:"command"`
	Commit  string    `json:"commit"` // of the folder of the binaries; "+": with changes
	CPU     string    `json:"cpu"`
	Cores   int       `json:"cores"`
	Kernel  string    `json:"kernel"`
	Go      string    `json:"go"`
	BIRD    string    `json:"bird"`
}

// String returns the processor, its cores and the kernel.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, Linux %s", m.CPU, m.Cores, m.Kernel)
}

// Describe reads the properties of the machine. A property that cannot be read is Unknown and does
// not prevent the measurement.
func Describe(ctx context.Context, binaries string) Machine {
	m := Machine{
		Date: time.Now(), Command: append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...), Cores: runtime.NumCPU(),
		CPU: Unknown, Kernel: Unknown, Go: runtime.Version(), BIRD: Unknown, Commit: Unknown,
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
	return Unknown
}
