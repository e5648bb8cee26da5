package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/credentials"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/meridiotest"
	"github.com/vipgate/vipgate/test/nsptest"
)

// Methods of the rows 22 to 26: the sources of the frontend's configuration and readiness.
const (
	viaMeridio = "NSP, Meridio's LB"
	viaFile    = "trench file, lb"
)

const (
	// meridioLB is the program that serves as Meridio's load balancer.
	meridioLB = "meridio-lb"
	// nspID is a member of the trust domain, as Meridio's NSP is.
	nspID = "spiffe://" + lab.TrustDomain + "/nsp"
	// meridioLifetime is the lifetime of the certificates of the NSP and of Meridio's load
	// balancer, longer than any row.
	meridioLifetime = 12 * time.Hour

	meridioTrench, meridioAttractor = "trench-a", "attractor-a-1"
)

// path is one of the two methods.
type path struct {
	method, against string
	// script starts a load balancer in this process and a frontend, waits for all VIPs, and returns
	// a function that makes all VIPs ready, or none.
	script func(*fixture) (set func(up bool) error, err error)
	// prepare starts the processes that must run before a pod starts.
	prepare func(*fixture) error
	// startLB starts the load balancer as a process, startFrontend the frontend.
	startLB, startFrontend func(*fixture) error
	// list returns a function that gives the frontend these VIPs. The list is built beforehand, so
	// that the time to build it is not measured.
	list func(*fixture, []vip.VIP) func() error
}

// paths are the two methods, in the order in which they are measured.
var paths = []path{
	{
		method: viaMeridio, against: viaFile,
		script:        (*fixture).startMeridioPod,
		prepare:       (*fixture).startNSP,
		startLB:       (*fixture).startMeridioLB,
		startFrontend: (*fixture).startMeridioFrontend,
		list: func(fx *fixture, vips []vip.VIP) func() error {
			list := fx.meridioList(vips)
			return func() error { fx.nsp.SetAttractors(list); return nil }
		},
	},
	{
		method: viaFile,
		script: func(fx *fixture) (func(bool) error, error) {
			lb, err := fx.startScriptedPod()
			if err != nil {
				return nil, err
			}
			return fx.scriptedSwitch(lb), nil
		},
		prepare:       (*fixture).startTarget,
		startLB:       func(fx *fixture) error { return fx.pod.StartLB() },
		startFrontend: func(fx *fixture) error { return fx.startFrontend() },
		list: func(fx *fixture, vips []vip.VIP) func() error {
			all := fx.vips
			defer func() { fx.vips = all }()
			fx.vips = vips
			text := fx.trench()
			return func() error { return fx.pod.WriteTrench(text) }
		},
	},
}

// mint returns the fixture's authority and an SVID of it.
func (fx *fixture) mint(id string) (*identity.DevAuthority, *x509svid.SVID, error) {
	a, err := identity.OpenDevAuthority(fx.ctx, fx.pod.Authority())
	if err != nil {
		return nil, nil, err
	}
	svid, err := a.MintFor(spiffeid.RequireFromString(id), meridioLifetime)
	return a, svid, err
}

// meridioCredentials returns server credentials as Meridio's: they authorize every member of its
// trust domain.
func (fx *fixture) meridioCredentials(id string) (credentials.TransportCredentials, error) {
	a, svid, err := fx.mint(id)
	if err != nil {
		return nil, err
	}
	return nsptest.ServerCredentials(svid, a.Bundle(svid.ID.TrustDomain())), nil
}

// startNSP starts an NSP in the pod's namespace that has the VIPs of the fixture, and removes the
// trench file. It ends with the fixture.
func (fx *fixture) startNSP() error {
	if err := os.Remove(fx.pod.TrenchFile()); err != nil {
		return err
	}
	creds, err := fx.meridioCredentials(nspID)
	if err != nil {
		return err
	}
	fx.nsp = nsptest.New(nsptest.Options{Credentials: creds, Listen: fx.Pod.Listen})
	fx.nsp.SetAttractors(fx.meridioList(fx.vips))
	if err := fx.nsp.Start(); err != nil {
		return err
	}
	fx.ends = append(fx.ends, fx.nsp.Stop)
	return nil
}

// meridioList returns the fixture's attractor with these VIPs, as the NSP sends it.
func (fx *fixture) meridioList(vips []vip.VIP) *nspv1.Attractor {
	trench := &nspv1.Trench{Name: meridioTrench}
	a := &nspv1.Attractor{Name: meridioAttractor, Trench: trench}
	for i, v := range vips {
		a.Vips = append(a.Vips, &nspv1.Vip{Name: fmt.Sprintf("vip-%d", i), Address: v.Prefix().String(), Trench: trench})
	}
	for i, f := range fx.families {
		a.Gateways = append(a.Gateways, &nspv1.Gateway{
			Name: fmt.Sprintf("gateway-%d", i), Address: gatewayAddr(f).String(), IpFamily: f.String(),
			Protocol: "bgp", Trench: trench,
		})
	}
	return a
}

// startMeridioFrontend starts the frontend with the NSP as the source of its configuration.
func (fx *fixture) startMeridioFrontend() error {
	err := fx.pod.StartMeridioFrontend(fx.nsp.Addr(), meridioTrench, meridioAttractor, "--flap-backoff=off")
	if err != nil {
		return err
	}
	fx.guard(fx.pod.Frontend)
	return nil
}

// startMeridioPod starts an NSP, a load balancer of Meridio in this process and a frontend.
func (fx *fixture) startMeridioPod() (set func(up bool) error, err error) {
	creds, err := fx.meridioCredentials(lab.LBID)
	if err != nil {
		return nil, err
	}
	lb, err := startMeridioService(fx.pod.Socket(), creds)
	if err != nil {
		return nil, err
	}
	fx.ends = append(fx.ends, lb.Stop)
	if err := fx.startNSP(); err != nil {
		return nil, err
	}
	lb.SetAvailable(true)
	if err := fx.startMeridioFrontend(); err != nil {
		return nil, err
	}
	return func(up bool) error { lb.SetAvailable(up); return nil }, fx.waitAll()
}

// startMeridioService starts a load balancer of Meridio that is not available.
func startMeridioService(socket string, creds credentials.TransportCredentials) (*meridiotest.LB, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	lb := meridiotest.New(meridiotest.Options{Socket: socket, Credentials: creds, Host: host})
	return lb, lb.Start()
}

// startMeridioLB starts a load balancer of Meridio as a process. It is available while the NSP has
// the frontend's registration.
func (fx *fixture) startMeridioLB() error {
	dir := fx.path("meridio-lb")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	a, svid, err := fx.mint(lab.LBID)
	if err != nil {
		return err
	}
	if err := a.WriteFiles(dir, svid); err != nil {
		return err
	}
	fx.pod.LB, err = fx.Start(fx.Pod, meridioLB, filepath.Join(fx.pod.Binaries, meridioLB), "-available",
		"-socket="+fx.pod.Socket(), "-svid-dir="+dir, "-nsp="+fx.nsp.Addr())
	return err
}
