package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// kernelKinds are the lines of /proc/meminfo that grow with the memory of nftables and routing:
// unreclaimable slab memory for small allocations, and vmalloc memory for larger ones.
var kernelKinds = []string{"SUnreclaim:", "VmallocUsed:"}

// kernelMemory returns the sum of kernelKinds in MiB, for the whole machine.
func kernelMemory() (float64, error) {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("memory of the kernel: %w", err)
	}
	return kernelMemoryIn(string(info))
}

func kernelMemoryIn(info string) (float64, error) {
	var sum uint64
	found := 0
	for line := range strings.Lines(info) {
		words := strings.Fields(line)
		if len(words) != 3 || !slices.Contains(kernelKinds, words[0]) || words[2] != "kB" {
			continue
		}
		kib, err := strconv.ParseUint(words[1], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/meminfo: line %q: %w", line, err)
		}
		sum += kib
		found++
	}
	if found != len(kernelKinds) {
		return 0, fmt.Errorf("/proc/meminfo has not all of %v", kernelKinds)
	}
	return float64(sum) / 1024, nil
}

// heapMemory returns the size of this process's heap that is in use, in MiB.
func heapMemory() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}

// measureTables is row 19: the memory and time of a stream, by the size of its tables.
func measureTables(ctx context.Context, s *session) error {
	for _, x := range []struct{ size, streams, quick int }{{1009, 50, 5}, {10_007, 10, 2}, {65_537, 4, 1}} {
		what := func(what, unit string) *Measurement {
			return &Measurement{Row: 19, What: what, Method: vipgate, N: x.size, Unit: unit}
		}
		t := &tableMeasurement{
			size: uint32(x.size), streams: s.sizes([]int{x.streams}, []int{x.quick})[0], settle: s.lasts(
				time.Second, 100*time.Millisecond,
			),
			kernel: what("memory of a stream: kernel", "MiB"), heap: what("memory of a stream: heap of the process",
				"MiB"),
			comes: what("a stream comes → confirmed", "ms"), drains: what("one target drains → confirmed", "ms"),
		}
		for range s.repeats(5, 1) {
			if err := t.measure(ctx); err != nil {
				return fmt.Errorf("tables of %d: %w", x.size, err)
			}
		}
		for _, m := range []*Measurement{t.kernel, t.heap, t.comes, t.drains} {
			s.record(*m)
		}
	}
	return nil
}

// tableMeasurement measures streams of one size of table.
type tableMeasurement struct {
	size    uint32
	streams int
	settle  time.Duration

	kernel, heap, comes, drains *Measurement
}

// measure measures once, in a separate lab.
func (t *tableMeasurement) measure(ctx context.Context) (err error) {
	const targets = 10
	g, err := newPlaneFixture(ctx, (t.streams+1)*targets, bothFamilies)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.start(ctx, dataplane.ConntrackOn, dataplane.FastPathOff); err != nil {
		return err
	}
	// The first stream also allocates shared state, which must not count as a stream's.
	wanted := planeStreams(0, 1, targets, t.size, bothFamilies)
	if _, err := g.plane.configure(wanted); err != nil {
		return err
	}
	heapBefore := heapMemory()
	kernelBefore, err := t.settledKernel(ctx)
	if err != nil {
		return err
	}
	for i := range t.streams {
		wanted = maps.Clone(wanted)
		maps.Copy(wanted, planeStreams(i+1, 1, targets, t.size, bothFamilies))
		took, err := g.plane.configure(wanted)
		if err != nil {
			return err
		}
		t.comes.Samples = append(t.comes.Samples, milliseconds(took))
	}
	heapAfter := heapMemory()
	kernelAfter, err := t.settledKernel(ctx)
	if err != nil {
		return err
	}
	t.heap.Samples = append(t.heap.Samples, (heapAfter-heapBefore)/float64(t.streams))
	t.kernel.Samples = append(t.kernel.Samples, (kernelAfter-kernelBefore)/float64(t.streams))
	for i := range min(t.streams, targets) {
		took, err := g.plane.configure(with(wanted, withRole(wanted[streamName(i)], i, plan.Draining)))
		if err != nil {
			return err
		}
		t.drains.Samples = append(t.drains.Samples, milliseconds(took))
		if _, err := g.plane.configure(wanted); err != nil {
			return err
		}
	}
	return nil
}

// settledKernel returns the kernel's memory after the remains of transactions were freed.
func (t *tableMeasurement) settledKernel(ctx context.Context) (float64, error) {
	if err := backoff.Sleep(ctx, t.settle); err != nil {
		return 0, err
	}
	return kernelMemory()
}
