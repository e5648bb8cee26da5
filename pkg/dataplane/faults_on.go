//go:build vipgate_faults

package dataplane

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// faultAt is where the process ends, read once.
var faultAt = sync.OnceValues(func() (string, int64) {
	step, times, _ := strings.Cut(os.Getenv("VIPGATE_FAULT"), ":")
	n, err := strconv.ParseInt(times, 10, 64)
	if err != nil {
		n = 1
	}
	return step, n
})

var faultsSeen atomic.Int64

// fault kills the process as the kernel would, if it is this step's turn.
func fault(step string) {
	at, n := faultAt()
	if step == at && faultsSeen.Add(1) == n {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}
