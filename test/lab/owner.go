package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is USER_HZ, the unit of times in /proc (proc(5)); it is 100 on
// every architecture that Go runs on.
const ticksPerSecond = 100

// reuseMargin allows for the boot time, which is known in whole seconds only.
const reuseMargin = 2 * time.Second

// OwnerRuns reports whether the process that created an object at the time created still runs. A
// zombie does not, nor does a process that got the same ID after that time. It reports true if
// /proc cannot be read.
func OwnerRuns(pid string, created time.Time) bool {
	state, ticks, err := processState(pid)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH):
		return false
	case err != nil:
		return true
	}
	if state == "Z" || state == "X" {
		return false
	}
	boot, err := bootTime()
	if err != nil {
		return true
	}
	started := boot.Add(time.Duration(ticks) * time.Second / ticksPerSecond)
	return !started.After(created.Add(reuseMargin))
}

// processState reads the state of a process and when it started, in ticks since
// the boot (fields 3 and 22 of /proc/PID/stat).
func processState(pid string) (state string, ticks int64, err error) {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return "", 0, err
	}
	// The name, field 2, may hold spaces and parentheses.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 20 {
		return "", 0, fmt.Errorf("/proc/%s/stat has %d fields after the name", pid, len(fields))
	}
	ticks, err = strconv.ParseInt(fields[19], 10, 64)
	return fields[0], ticks, err
}

func bootTime() (time.Time, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return time.Time{}, err
	}
	for line := range strings.Lines(string(b)) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == "btime" {
			seconds, err := strconv.ParseInt(words[1], 10, 64)
			return time.Unix(seconds, 0), err
		}
	}
	return time.Time{}, fmt.Errorf("/proc/stat has no btime")
}
