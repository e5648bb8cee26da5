package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	outageVIPs = 100
	// gatewayHold is the hold time that both ends of the gateway's session offer.
	gatewayHold = 3 * time.Second
	// inARow is the number of outages of a gateway, each thereFor after the previous one ended: a
	// back-off that grows with each loss becomes visible.
	inARow   = 3
	thereFor = time.Second
	// outageTimeout exceeds the recovery time of the reference.
	outageTimeout = 6 * time.Minute
)

// outage is a kind of outage of a gateway.
type outage struct {
	what       string
	lasts      time.Duration
	begin, end func(*fixture) error
}

var outages = []outage{
	{
		what: "carrier lost for 2 s", lasts: 2 * time.Second,
		begin: func(fx *fixture) error { return fx.Gateway.IP("link", "set", "trench0", "down") },
		end:   func(fx *fixture) error { return fx.Gateway.IP("link", "set", "trench0", "up") },
	},
	{
		what: "session reset and port closed for 2 s", lasts: 2 * time.Second,
		begin: func(fx *fixture) error { err := fx.receiver.Refuse(); fx.receiver.Reset(); return err },
		end:   func(fx *fixture) error { return fx.receiver.Listen() },
	},
	// It is shorter than the hold time, so the session may survive.
	{what: "silence for 2 s", lasts: 2 * time.Second, begin: (*fixture).dropTraffic, end: (*fixture).restoreTraffic},
	{
		what: "silence for the hold time and 2 s more", lasts: gatewayHold + 2*time.Second, begin: (*fixture).dropTraffic,
		end: (*fixture).restoreTraffic,
	},
}

const silenceRules = `table inet silence {
	chain input { type filter hook input priority -500; iifname "trench0" drop; }
	chain output { type filter hook output priority -500; oifname "trench0" drop; }
}
`

// dropTraffic drops all packets to and from the gateway.
func (fx *fixture) dropTraffic() error {
	path := fx.path("silence.nft")
	if err := os.WriteFile(path, []byte(silenceRules), 0o600); err != nil {
		return fmt.Errorf("rules that silence the gateway: %w", err)
	}
	_, err := fx.Gateway.Run(fx.ctx, "nft", "-f", path)
	return err
}

func (fx *fixture) restoreTraffic() error {
	_, err := fx.Gateway.Run(fx.ctx, "nft", "delete", "table", "inet", "silence")
	return err
}

// apply causes one outage and returns the seconds after its end until all VIPs were permanently
// back.
func (o outage) apply(fx *fixture) (float64, error) {
	mark, began := fx.receiver.Mark(), time.Now()
	if err := o.begin(fx); err != nil {
		return 0, err
	}
	if err := fx.pause(o.lasts); err != nil {
		return 0, err
	}
	back := time.Now()
	if err := o.end(fx); err != nil {
		return 0, err
	}
	// A session that is still up may be lost until the hold timer expires that was set before the
	// outage.
	limit, cancel := context.WithDeadline(fx.ctx, began.Add(max(o.lasts, gatewayHold)+1500*time.Millisecond))
	defer cancel()
	_, err := fx.receiver.WaitFor(limit, mark, func(r lab.PrefixUpdate) bool { return r.Withdrawn })
	switch {
	case fx.ctx.Err() != nil:
		return 0, context.Cause(fx.ctx)
	case err != nil:
		return 0, nil // no VIP was lost
	}
	patient, cancel := context.WithTimeout(fx.ctx, outageTimeout)
	defer cancel()
	at, err := fx.receiver.WaitCount(patient, len(fx.vips))
	if err != nil {
		return 0, fx.explain(patient, fmt.Errorf("%s: %w", o.what, err))
	}
	return max(0, at.Sub(back).Seconds()), nil
}

// outageResult holds the seconds until the VIPs were back, by the number of the
// outage in a row.
type outageResult struct {
	outage outage
	method string
	took   [inARow][]float64
	err    error
}

// measureOutages is row 8. All kinds of outages are measured at the same time, each on separate
// fixtures: all of them wait nearly all of the time.
func measureOutages(ctx context.Context, s *session) error {
	methods, ways, times := []string{vipgate, reference}, outages, inARow
	if s.quick {
		// The reference takes minutes, and longest with the last kind.
		methods, ways, times = methods[:1], outages[:len(outages)-1], 1
	}
	var results []*outageResult
	for _, o := range ways {
		for _, method := range methods {
			results = append(results, &outageResult{outage: o, method: method})
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for _, r := range results {
		repeats := s.repeats(10, 1)
		if r.method == reference {
			repeats = 1
		}
		wg.Go(func() {
			for range repeats {
				if r.err = r.measure(ctx, s, times); r.err != nil {
					cancel()
					return
				}
			}
		})
	}
	wg.Wait()
	var errs []error
	for _, r := range results {
		if r.err != nil && !errors.Is(r.err, context.Canceled) {
			errs = append(errs, fmt.Errorf("%s, %s: %w", r.outage.what, r.method, r.err))
		}
		var goal string
		if r.method == vipgate {
			goal = "max ≤ 3"
		}
		for i, samples := range r.took {
			if len(samples) > 0 {
				s.record(Measurement{Row: 8, What: fmt.Sprintf("gateway gone (%s), back → all VIPs there; time %d in "+
					"a row", r.outage.what, i+1), Method: r.method, N: outageVIPs, Unit: "s", Goal: goal, Samples: samples})
			}
		}
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// measure starts a pod, or the reference in its place, and causes outages of its gateway.
func (r *outageResult) measure(ctx context.Context, s *session, times int) error {
	return on(ctx, s, outageVIPs, oneFamily, func(fx *fixture) (err error) {
		if r.method == vipgate {
			if err := fx.startTarget(); err != nil {
				return err
			}
			_, err = fx.startPod()
		} else {
			err = fx.startPlainBIRD()
		}
		if err != nil {
			return err
		}
		for i := range times {
			if err := fx.pause(thereFor); err != nil {
				return err
			}
			took, err := r.outage.apply(fx)
			if err != nil {
				return err
			}
			r.took[i] = append(r.took[i], took)
		}
		return nil
	})
}

// startPlainBIRD starts a BIRD in the pod that announces the VIPs from static routes, with
// BIRD's default timers except for the hold time, as is common in the field. It waits until all
// VIPs are at the gateway.
func (fx *fixture) startPlainBIRD() error {
	var conf strings.Builder
	fmt.Fprintf(&conf, `log stderr all;
router id %[1]s;
protocol device { }
protocol bgp upstream {
	local %[1]s port %[3]d as %[4]d;
	neighbor %[2]s port %[3]d as %[5]d;
	interface "%[6]s";
	direct;
	strict bind;
	hold time 3;
	ipv4 { import none; export where source = RTS_STATIC; next hop self; };
}
protocol static vips {
	ipv4;
`, lab.PodExternal4, lab.GatewayA4, lab.BGPPort, lab.PodAS, uint32(lab.GatewayAS), lab.External)
	for _, v := range fx.vips {
		fmt.Fprintf(&conf, "\troute %s blackhole;\n", v)
	}
	conf.WriteString("}\n")
	path := fx.path("plain.conf")
	if err := os.WriteFile(path, []byte(conf.String()), 0o600); err != nil {
		return fmt.Errorf("configuration of a plain BIRD: %w", err)
	}
	p, err := fx.Start(fx.Pod, "plain-bird", lab.BIRD(), "-f", "-c", path, "-s", fx.path("plain.ctl"))
	if err != nil {
		return err
	}
	fx.guard(p)
	_, err = fx.waitCount(len(fx.vips))
	return err
}
