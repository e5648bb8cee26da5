package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/vipgate/vipgate/test/lab"
)

// router is a gateway whose processes may be killed and polled at the same time.
type router struct {
	lab.Router
	names []string // of its processes, in the order of Processes

	starting sync.Mutex // one start at a time
	mu       sync.Mutex
	live     []*lab.Process
}

// frrNames are the daemons of an FRR, in the order of Processes.
var frrNames = []string{"zebra", "bfdd", "bgpd"}

// startGateways starts one BIRD and one FRR.
func (fx *fixture) startGateways() error {
	b := lab.GatewayB()
	b.BFD, b.BFDMultiplier = true, 3
	for g, r := range []struct {
		kind   lab.Kind
		ns     *lab.NetNS
		config lab.GatewayConfig
		names  []string
	}{
		{lab.KindBIRD, fx.Gateway, lab.GatewayA(), []string{"bird"}},
		{lab.KindFRR, fx.Second, b, frrNames},
	} {
		for f := range families {
			client := netip.PrefixFrom(clientAddr(g, f), clientAddr(g, f).BitLen())
			r.config.Routes = append(r.config.Routes, client)
			if err := r.ns.Addr("lo", client.String()); err != nil {
				return err
			}
		}
		started, err := fx.StartRouter(r.kind, r.ns, r.config)
		if err != nil {
			return err
		}
		fx.routers[g] = &router{Router: started, names: r.names, live: started.Processes()}
		if len(fx.routers[g].live) != len(r.names) {
			return fmt.Errorf("%s has %d processes, expected %v", gatewayName(g), len(fx.routers[g].live), r.names)
		}
	}
	return nil
}

// frr returns the router as an FRR.
func (r *router) frr() *lab.FRR { return r.Router.(*lab.FRR) }

// start starts the gateway's processes that do not run.
func (r *router) start() error {
	r.starting.Lock()
	defer r.starting.Unlock()
	err := r.Start()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live = r.Processes()
	return err
}

// processes returns the current processes, or the last ones.
func (r *router) processes() []*lab.Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.live
}

// process returns a process by its name; nil if it does not exist.
func (r *router) process(name string) *lab.Process {
	for i, p := range r.processes() {
		if r.names[i] == name {
			return p
		}
	}
	return nil
}

// kill kills processes by their names, all without names. It waits for the end of a start: a fault
// may come before the start that healed the last one has ended.
func (r *router) kill(names ...string) error {
	r.starting.Lock()
	defer r.starting.Unlock()
	var errs []error
	for i, p := range r.processes() {
		if len(names) == 0 || slices.Contains(names, r.names[i]) {
			errs = append(errs, p.Kill())
		}
	}
	return errors.Join(errs...)
}

// killDaemon kills one daemon of an FRR. When zebra comes back, the other daemons are restarted, as
// watchfrr does: they would reconnect to it after 10 s only.
func (r *router) killDaemon(name string) (func(context.Context) error, error) {
	return func(context.Context) error {
		var err error
		if name == "zebra" {
			err = r.kill()
		}
		return errors.Join(err, r.start())
	}, r.kill(name)
}

// stop ends an FRR as an init system does, after a start.
func (r *router) stop(ctx context.Context) error {
	r.starting.Lock()
	defer r.starting.Unlock()
	return r.frr().Stop(ctx)
}
