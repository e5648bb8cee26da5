package main

import (
	"os"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestPeakMemory(t *testing.T) {
	for _, c := range []struct {
		status string
		want   float64
		ok     bool
	}{
		{"Name:\tlb\nVmPeak:\t 9999 kB\nVmHWM:\t   20480 kB\nVmRSS:\t 1 kB\n", 20, true},
		{"VmHWM:\t 512 kB", 0.5, true},
		{"VmHWM:\t many kB\n", 0, false},
		{"VmHWM:\t 512 MB\n", 0, false}, // not the unit that the kernel writes
		{"Name:\tkthreadd\n", 0, false},
		{"", 0, false},
	} {
		got, err := peakMemory(c.status)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("peakMemory(%q) = %v, %v; want %v", c.status, got, err, c.want)
		}
	}
}

func TestUsageOfProcess(t *testing.T) {
	before, err := usageOf(os.Getpid())
	harness.Must(t, err)
	after := before
	for after.cpu == before.cpu { // this loop consumes the processor time
		if after, err = usageOf(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel counts resident pages for each processor, and adds them up late: within 1 MiB.
	if after.cpu < before.cpu || after.peak < before.peak-1 || before.cpu <= 0 || before.peak <= 0 {
		t.Errorf("used %+v, later %+v", before, after)
	}
}

func TestUsageOfMissingProcess(t *testing.T) {
	const beyondEveryPID = 1 << 23
	if u, err := usageOf(beyondEveryPID); err == nil {
		t.Errorf("usage of no process: %+v", u)
	}
}
