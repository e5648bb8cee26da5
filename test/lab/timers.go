package lab

import (
	"fmt"
	"time"
)

// Timers of the lab. They detect a silent peer so late that a stall of the machine expires none of
// them: a test of another subject must not fail because its processes did not run for two seconds.
// The death of a process and a closed port are detected as fast as ever, because the kernel answers
// for them. A test of a timer sets that timer itself.
const (
	// HoldSeconds is the hold time of sessions with gateways, as offered by the gateways. Both sides
	// use the shorter offer, so that a test shortens it at one side.
	HoldSeconds = 240
	// Lease is how long a frontend relies on a silent lb: the longest that a frontend accepts.
	Lease = time.Minute
	// CheckTimers are the timers of a check in a trench file. A refused connection fails the target
	// within the interval and 0.1 s, a silent target after ten timeouts.
	CheckTimers = "interval: 500ms, timeout: 500ms, fastInterval: 10ms, rise: 1, fall: 10"
	// BFDMultiplier is how many packets of a BFD session, 100 ms apart, may be missing.
	BFDMultiplier = 50
	// BFDDetection is the time until such a session detects a silent peer.
	BFDDetection = BFDMultiplier * 100 * time.Millisecond
)

// Timers as arguments of the programs.
var (
	LBTimers       = []string{"--lease=" + Lease.String()}
	FrontendTimers = []string{fmt.Sprintf("--lb-bgp-hold-time=%ds", HoldSeconds)}
	// BIRDTimer is the product's: BIRD that is silent for 2 s counts as hung.
	BIRDTimer = "--lb-bgp-hold-time=3s"
)

// Timers as fields of a gateway in the trench file.
var (
	HoldTime = fmt.Sprintf("holdTime: %ds", HoldSeconds)
	BFD      = fmt.Sprintf("bfd: {minTx: 100ms, minRx: 100ms, multiplier: %d}", BFDMultiplier)
)
