package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// scriptedLB is a load balancer that says what a row has it say: the real table
// and service on the real socket with a real identity, without targets. It is
// here, in the process that measures, so that the moment of a decision is known
// on the receiver's clock.
type scriptedLB struct {
	table *readiness.Table
}

// The lease is no matter where it is used: it is long, lest a busy machine ends
// it. It beats as often as an lb with the default lease of 1 s does.
const (
	scriptedLease = 10 * time.Second
	scriptedBeat  = 200 * time.Millisecond
)

// startScriptedLB starts a scripted load balancer to which every VIP is ready,
// or none. It ends with the stage.
func (st *stage) startScriptedLB(ready bool) (*scriptedLB, error) {
	source, err := identity.NewDev(st.pod.Authority(), spiffeid.RequireFromString(lab.LBID), identity.Options{})
	if err != nil {
		return nil, err
	}
	listener, err := identity.Listen(st.ctx, identity.ListenOptions{Path: st.pod.Socket(), Mode: 0o600})
	if err != nil {
		return nil, err
	}
	lb := &scriptedLB{table: readiness.NewTable(readiness.TableOptions{Lease: scriptedLease})}
	frontend := spiffeid.RequireFromString(lab.FrontendID)
	service := readiness.NewServer(lb.table, readiness.ServerOptions{
		Peer: identity.PeerID, Role: readiness.RolesOf([]spiffeid.ID{frontend}, nil),
	})
	server := grpc.NewServer(append(readiness.GRPCOptions(),
		grpc.Creds(identity.ServerCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(frontend)})))...)
	readinessv1.RegisterReadinessServiceServer(server, service)

	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() {
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			st.fail(fmt.Errorf("identity of the scripted LB: %w", err))
		}
	})
	tasks.Go(func() {
		beat := time.NewTicker(scriptedBeat)
		defer beat.Stop()
		for {
			select {
			case <-beat.C:
				lb.table.Heartbeat()
			case <-ctx.Done():
				return
			}
		}
	})
	tasks.Go(func() {
		if err := server.Serve(listener); err != nil {
			st.fail(fmt.Errorf("socket of the scripted LB: %w", err))
		}
	})
	st.ends = append(st.ends, func() error {
		ending, done := context.WithTimeout(context.Background(), patience)
		defer done()
		err := service.EndWatches(ending)
		server.Stop()
		cancel()
		tasks.Wait()
		return err
	})
	lb.say(ready, st.vips...)
	return lb, nil
}

// say commits one decision about VIPs.
func (lb *scriptedLB) say(ready bool, vips ...vip.VIP) { lb.table.Commit(decision(ready, vips...)) }

// decision is that VIPs are ready or not.
func decision(ready bool, vips ...vip.VIP) readiness.Decision {
	d := readiness.Decision{Synced: true, Changed: make([]readiness.VIPReadiness, len(vips))}
	for i, v := range vips {
		d.Changed[i] = readiness.VIPReadiness{VIP: v, State: readiness.NotReady, Reason: readinessv1.VipReason_VIP_REASON_TOO_FEW_READY}
		if ready {
			d.Changed[i].State, d.Changed[i].Reason = readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY
		}
	}
	return d
}

// startScriptedPod starts a scripted load balancer and the frontend, and waits
// until every VIP is at the gateway.
func (st *stage) startScriptedPod() (*scriptedLB, error) {
	lb, err := st.startScriptedLB(true)
	if err != nil {
		return nil, err
	}
	if err := st.startFrontend(); err != nil {
		return nil, err
	}
	_, err = st.waitCount(len(st.vips))
	return lb, err
}
