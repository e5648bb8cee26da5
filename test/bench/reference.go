package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// referencePoll is the interval at which the reference polls BIRD.
const referencePoll = time.Second

// referenceRouter is the field's common technique: BIRD's configuration holds a static route for
// each VIP that is up, each change writes the whole file again and runs birdc configure, and the
// state of the sessions is polled with birdc once a second. Its sessions have vipgate's timers,
// so that only the technique differs.
type referenceRouter struct {
	fixture *fixture
	bird    *lab.Process
	head    []byte // the configuration without static routes

	mu  sync.Mutex
	up  []bool // by the index of the VIP
	buf bytes.Buffer

	// sessions is how many gateway sessions were up at the last poll.
	sessions *latest.Value[stateChange]
}

// stateChange is the result of a poll of the sessions, and the time at which it was read.
type stateChange struct {
	up int
	at time.Time
}

// startReference starts BIRD in the pod with every VIP up, and waits until all
// are at the gateway. It ends with the fixture.
func (fx *fixture) startReference() (*referenceRouter, error) {
	r := &referenceRouter{fixture: fx, up: make([]bool, len(fx.vips)), sessions: latest.New(stateChange{})}
	for i := range r.up {
		r.up[i] = true
	}
	var head strings.Builder
	fmt.Fprintf(&head, "router id %s;\nlog stderr all;\nprotocol device { scan time 1; }\n", lab.PodExternal4)
	for _, f := range fx.families {
		local, channel := lab.PodExternal4, "ipv4"
		if f == vip.IPv6 {
			local, channel = lab.PodExternal6, "ipv6"
		}
		fmt.Fprintf(&head, `protocol bgp NBR_%s {
	interface %q; local %s port %d as %d; neighbor %s port %d as %d;
	direct; strict bind; graceful restart off; hold time 3;
	connect delay time 1; connect retry time 5; error wait time 1, 5; error forget time 30;
	%s { import all; export where source = RTS_STATIC; next hop self; };
}
`, channel, lab.External, local, lab.BGPPort, lab.PodAS, gatewayAddr(f), lab.BGPPort, uint32(lab.GatewayAS), channel)
	}
	r.head = []byte(head.String())
	if err := r.write(); err != nil {
		return nil, err
	}
	var err error
	if r.bird, err = fx.Start(fx.Pod, "reference-bird", lab.BIRD(), "-f", "-c", r.config(), "-s",
		r.socket()); err != nil {
		return nil, err
	}
	fx.guard(r.bird)
	ctx, cancel := context.WithCancel(fx.ctx)
	var tasks sync.WaitGroup
	tasks.Go(func() { r.poll(ctx) })
	fx.ends = append(fx.ends, func() error { cancel(); tasks.Wait(); return nil })
	_, err = fx.waitCount(len(fx.vips))
	return r, err
}

func (r *referenceRouter) config() string { return r.fixture.path("reference.conf") }
func (r *referenceRouter) socket() string { return r.fixture.path("reference.ctl") }

// set changes the state of VIPs, by their indices, and has BIRD load it.
func (r *referenceRouter) set(up bool, indices ...int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range indices {
		r.up[i] = up
	}
	return r.configure()
}

// configure writes the whole file and has BIRD read it.
func (r *referenceRouter) configure() error {
	if err := r.write(); err != nil {
		return err
	}
	out, err := r.birdc("configure")
	if err == nil && !strings.Contains(out, "Reconfig") {
		err = errors.New(out)
	}
	if err != nil {
		return fmt.Errorf("reference: configure: %w", err)
	}
	return nil
}

func (r *referenceRouter) write() error {
	r.buf.Reset()
	r.buf.Write(r.head)
	for _, f := range r.fixture.families {
		channel := "ipv4"
		if f == vip.IPv6 {
			channel = "ipv6"
		}
		fmt.Fprintf(&r.buf, "protocol static VIP_%s {\n\t%s { preference 110; };\n", channel, channel)
		for i, v := range r.fixture.vips {
			if r.up[i] && v.Family() == f {
				r.buf.WriteString("\troute ")
				r.buf.WriteString(v.String())
				r.buf.WriteString(" blackhole;\n")
			}
		}
		r.buf.WriteString("}\n")
	}
	if err := writeWhole(r.config(), r.buf.Bytes()); err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	return nil
}

// birdc runs birdc, a process for each command.
func (r *referenceRouter) birdc(command string) (string, error) {
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	ctx, cancel := context.WithTimeout(r.fixture.ctx, waitTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, birdc,
		append([]string{"-s", r.socket()}, strings.Fields(command)...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("birdc %s: %w: %s", command, err, out)
	}
	return string(out), nil
}

// poll polls the sessions until ctx ends.
func (r *referenceRouter) poll(ctx context.Context) {
	tick := time.NewTicker(referencePoll)
	defer tick.Stop()
	for {
		// BIRD may not answer yet; the next poll retries.
		if out, err := r.birdc("show protocols all"); err == nil {
			r.sessions.Set(stateChange{up: strings.Count(out, "Established   "), at: time.Now()})
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// waitSessions waits until a poll finds n sessions up, and returns when it did.
func (r *referenceRouter) waitSessions(n int) (time.Time, error) {
	ctx, cancel := r.fixture.withTimeout()
	defer cancel()
	for {
		last, changed := r.sessions.Get()
		if last.up == n && !last.at.IsZero() {
			return last.at, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("the reference sees %d sessions, not %d: %w", last.up, n, context.Cause(ctx))
		}
	}
}

// all returns the indices of all VIPs.
func (r *referenceRouter) all() []int {
	return slices.Collect(func(yield func(int) bool) {
		for i := range r.up {
			if !yield(i) {
				return
			}
		}
	})
}

// follow configures the newest requested state in a loop; requests during a run are merged. It
// ends with the fixture.
func (r *referenceRouter) follow(fx *fixture, indices []int) (set func(up bool) error) {
	said := latest.New(true)
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(fx.ctx)
	go func() {
		defer close(done)
		is := true
		for {
			want, changed := said.Get()
			if want != is {
				if err := r.set(want, indices...); err != nil && ctx.Err() == nil {
					fx.fail(err)
					return
				}
				is = want
				continue
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	fx.ends = append(fx.ends, func() error { cancel(); <-done; return nil })
	return func(up bool) error { said.Set(up); return nil }
}
