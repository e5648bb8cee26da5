package main

import (
	"fmt"
	"net/netip"
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

// startGateways starts one BIRD and one FRR.
func (fx *fixture) startGateways() error {
	b := lab.GatewayB()
	b.BFD = true
	for g, r := range []struct {
		kind   lab.Kind
		ns     *lab.NetNS
		config lab.GatewayConfig
		names  []string
	}{
		{lab.KindBIRD, fx.Gateway, lab.GatewayA(), []string{"bird"}},
		{lab.KindFRR, fx.Second, b, []string{"zebra", "bfdd", "bgpd"}},
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
