package load

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/task"
)

// Back-off of a flow that cannot be opened.
const (
	leastPause = 50 * time.Millisecond
	mostPause  = time.Second
)

// flow is one long-lived connection.
type flow struct {
	number int
	to     netip.AddrPort
	opened time.Duration // since the start of the generator

	// Guarded by the generator's lock.
	target string // the name in the last answer; "" until the first answer
	// phase is the phase in which the current exchange began.
	phase *phase
	last  time.Time // the last answer
}

// keep keeps one flow open until sending ends.
func (g *Generator) keep(ctx, sending context.Context, number int) {
	pause := leastPause
	for sending.Err() == nil {
		f := &flow{number: number, to: g.c.FlowsTo[number%len(g.c.FlowsTo)], opened: time.Since(g.start)}
		established := g.run(ctx, sending, f)
		if established && !g.c.Redial {
			return
		}
		if established {
			pause = leastPause
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-sending.Done():
		}
		timer.Stop()
		pause = min(2*pause, mostPause)
	}
}

// run opens a flow, exchanges frames until it breaks or sending ends, and records its outcome.
// It reports whether the flow was ever established.
func (g *Generator) run(ctx, sending context.Context, f *flow) bool {
	g.mu.Lock()
	f.phase, f.last = g.phase, time.Now()
	g.flows[f.number] = f
	g.mu.Unlock()
	err := g.exchange(ctx, sending, f)
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.flows, f.number)
	if err == nil {
		return f.target != ""
	}
	stage := "flow at " + f.target
	if f.target == "" {
		stage = "open flow"
		f.phase.result.Unopened++
	} else {
		record := g.record(f)
		record.Broken = err.Error()
		record.LongestGap = max(record.LongestGap, time.Since(f.last))
	}
	g.fail(f.phase, f.to, stage, err)
	return f.target != ""
}

// exchange opens a flow and exchanges frames. It returns nil when sending ended.
func (g *Generator) exchange(ctx, sending context.Context, f *flow) error {
	dialing, cancel := task.WithAwakeTimeout(sending, g.c.Timeout)
	defer cancel()
	conn, err := g.c.dial(dialing, f.to)
	if err != nil {
		if sending.Err() != nil {
			return nil
		}
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	in := bufio.NewReaderSize(conn, 4*maxFrame)
	pace := time.NewTicker(g.c.Pace)
	defer pace.Stop()
	download := f.number < g.c.Downloads
	for sequence := 1; ; sequence++ {
		target, err := g.frame(ctx, conn, in, sequence, download)
		if err == nil && f.target != "" && f.target != target {
			err = fmt.Errorf("%s answers in the place of %s", target, f.target)
		}
		if err != nil {
			return err
		}
		g.answered(f, target)
		if download && sending.Err() == nil {
			continue // at the pace of the application
		}
		select {
		case <-pace.C:
		case <-sending.Done():
			return nil
		}
	}
}

// frame sends one frame and returns who answered it. A download sends only the first one.
func (g *Generator) frame(ctx context.Context, conn net.Conn, in *bufio.Reader, sequence int, download bool,
) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(g.c.Silence)); err != nil {
		return "", err
	}
	if ctx.Err() != nil { // ctx ended before the deadline was set
		return "", context.Cause(ctx)
	}
	ask := fmt.Sprintf("%d\n", sequence)
	switch {
	case download && sequence > 1:
		ask = ""
	case download:
		ask = sendCommand + g.c.Pace.String() + "\n"
	}
	if _, err := io.WriteString(conn, ask); err != nil {
		return "", err
	}
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	target, got, found := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	if !found || target == "" || got != fmt.Sprint(sequence) {
		return "", fmt.Errorf("frame %d was answered %q", sequence, line)
	}
	return target, nil
}

// answered records an answer in the phase in which its exchange began.
func (g *Generator) answered(f *flow, target string) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	first := f.target == ""
	f.target = target
	record := g.record(f)
	record.Exchanges++
	if !first { // the time to open a flow does not count as a gap
		record.LongestGap = max(record.LongestGap, now.Sub(f.last))
	}
	f.last, f.phase = now, g.phase
	g.record(f) // a flow belongs to every phase in which it lives
}

// record returns the record of a flow in the phase of its current exchange. The lock is held.
func (g *Generator) record(f *flow) *Flow {
	r := f.phase.flows[f]
	if r == nil {
		r = &Flow{Number: f.number, To: f.to, Target: f.target, Opened: f.opened}
		f.phase.flows[f] = r
	}
	return r
}
