package crash

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Variable is the environment variable that selects the step after which [After] kills the
// process: STEP, or STEP:N for the N-th time.
const Variable = "VIPGATE_CRASH_AFTER"

// The steps of a change, in their order.
const (
	// Planned: the kernel state is unchanged.
	Planned = "planned"
	// Routes: rules and routes of new targets are installed.
	Routes = "routes"
	// Written: the nftables transaction is committed.
	Written = "written"
	// Flushed: connection tracking entries of removed targets are deleted.
	Flushed = "flushed"
	// Unrouted: rules and routes of removed targets are removed.
	Unrouted = "unrouted"
	// ReadBack: the changed objects were read back.
	ReadBack = "read-back"
	// Published: the state is published.
	Published = "published"
)

// Steps are all steps.
var Steps = []string{Planned, Routes, Written, Flushed, Unrouted, ReadBack, Published}

var selected = sync.OnceValues(func() (step string, times int64) {
	step, count, _ := strings.Cut(os.Getenv(Variable), ":")
	times, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		times = 1
	}
	return step, times
})

var seen atomic.Int64

// After kills the process if the step is the selected one.
func After(step string) {
	at, times := selected()
	if step == at && seen.Add(1) == times {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}
