package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// sitePatience bounds every wait for something that must happen.
const sitePatience = time.Minute

// siteCheckPort is where the target of a site accepts connections.
const siteCheckPort = 5000

// site is a laboratory of its own with a pod that serves n IPv4 VIPs by one target,
// and a receiver in the gateway's place. All have default settings, but that one
// good check suffices.
type site struct {
	n       int
	lab     *lab.Lab
	pod     *lab.Pod
	target  *lab.Target
	gateway *lab.Receiver
}

// siteVIP is the VIP with a number, from 0.
func siteVIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)})
}

// newSite makes a site where target and gateway wait, and nothing of the pod
// runs. The caller closes it.
func newSite(s *session, n int) (_ *site, err error) {
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	x := &site{n: n, lab: l, pod: &lab.Pod{Lab: l, Binaries: s.binaries}}
	x.target = lab.NewTarget(l.Backend, netip.AddrPortFrom(lab.Target1v4, siteCheckPort))
	defer func() {
		if err != nil {
			err = errors.Join(err, x.close())
		}
	}()
	if err := errors.Join(x.pod.WriteTrench(siteTrench(n)), x.target.Up()); err != nil {
		return nil, err
	}
	x.gateway, err = lab.StartReceiver(l.Gateway, lab.ReceiverConfig{Local: []netip.Addr{lab.GatewayA4}, Default: true})
	return x, err
}

func siteTrench(n int) string {
	vips := make([]string, n)
	for i := range vips {
		vips[i] = siteVIP(i).String() + "/32"
	}
	return fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%[1]s]
  gateways:
    - {name: gateway-a, address: %[2]s}
streams:
  - name: stream-a
    vips: [%[1]s]
    check: {tcp: {port: %[3]d}, interval: 1s, timeout: 500ms, rise: 1, fall: 2}
    targets:
      - {name: target-1, ips: [%[4]s]}
`, strings.Join(vips, ", "), lab.GatewayA4, siteCheckPort, lab.Target1v4)
}

// start starts lb and frontend, and returns when the last VIP came to the gateway.
func (x *site) start(ctx context.Context) (time.Time, error) {
	if err := errors.Join(x.pod.StartLB(), x.pod.StartFrontend()); err != nil {
		return time.Time{}, err
	}
	return x.announced(ctx)
}

// announced waits until all VIPs are at the gateway, and returns since when.
func (x *site) announced(ctx context.Context) (time.Time, error) { return x.holds(ctx, x.n) }

func (x *site) holds(ctx context.Context, n int) (time.Time, error) {
	limit, cancel := context.WithTimeout(ctx, sitePatience)
	defer cancel()
	at, err := x.gateway.WaitCount(limit, n)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w; last lines of the frontend: %s", err, tail(x.pod.Frontend))
	}
	return at, err
}

func tail(p *lab.Process) string {
	if p == nil {
		return "not started"
	}
	return p.Tail(5)
}

func (x *site) close() error {
	errs := []error{x.target.Down()}
	if x.gateway != nil {
		errs = append(errs, x.gateway.Close())
	}
	return errors.Join(append(errs, x.lab.Close())...)
}

// pause waits unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
