package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// longLife is the life of an SVID that is not meant to expire.
const longLife = time.Hour

// attestor is the Workload API of one program of the pod.
type attestor struct {
	api *identitytest.WorkloadAPI
	ca  *identitytest.CA
	id  spiffeid.ID
}

// offer offers a fresh SVID and returns when it expires.
func (a *attestor) offer(life time.Duration) time.Time {
	svid := a.ca.SVID(a.id, life)
	a.api.Offer(a.ca, []*x509svid.SVID{svid})
	return svid.Certificates[0].NotAfter
}

// The programs that an argument selects.
var (
	programNames     = []string{"lb", "frontend", "both"}
	programResources = [][]string{{resAPILB}, {resAPIFrontend}, {resAPILB, resAPIFrontend}}
)

func (fx *fixture) attestors(arg int) []*attestor {
	return [][]*attestor{{fx.lbID}, {fx.frontendID}, {fx.lbID, fx.frontendID}}[arg]
}

// identityKinds returns the faults of identities. As long as an SVID is valid, they have no
// effect at a gateway.
func identityKinds() []*kind {
	ofAPI := func(name string, weight int, d span) *kind {
		k := simple(name, weight, d, quiet, nothing).variants(len(programNames),
			func(arg int) string { return programNames[arg] })
		k.holds = func(arg int) []string { return programResources[arg] }
		return k
	}
	// api breaks the Workload API. A fresh offer, or a start, heals it.
	api := func(fail, heal func(*attestor)) func(context.Context, *fixture, fault) (func(context.Context) error,
		error) {
		return func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
			for _, a := range fx.attestors(f.Arg) {
				fail(a)
			}
			return func(context.Context) error {
				for _, a := range fx.attestors(f.Arg) {
					heal(a)
				}
				return nil
			}, nil
		}
	}
	renew := func(a *attestor) { a.offer(longLife) }
	return []*kind{
		ofAPI("SVID rotated", 4, once).by(api(renew, func(*attestor) {})),
		ofAPI("SVIDs rotated all the time", 2, ms(500, 3000)).by(rotateOften),
		ofAPI("Workload API gone", 3, ms(200, 4000)).by(
			api(func(a *attestor) { a.api.Stop() }, func(a *attestor) { renew(a); a.api.Start() }),
		),
		ofAPI("Workload API mute", 2, ms(200, 4000)).by(api(func(a *attestor) { a.api.Mute() }, renew)),
		ofAPI("Workload API denies", 2, ms(200, 4000)).by(api(func(a *attestor) { a.api.Deny() }, renew)),
		ofAPI("Workload API garbles", 2, ms(200, 4000)).by(api(func(a *attestor) { a.api.Garble() }, renew)),
		simple("SVID expires", 4, ms(3500, 5000), wide, everything, resLB, resFrontend, resStream, resAPILB,
			resAPIFrontend).
			variants(2, func(arg int) string { return programNames[arg] }).by(expire),
	}
}

// rotateOften offers a fresh SVID at short intervals.
func rotateOften(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	interval := time.Duration(50+f.Salt%300) * time.Millisecond
	var stops []func()
	for _, a := range fx.attestors(f.Arg) {
		stops = append(stops, a.api.Rotate(a.ca, a.id, interval, longLife))
	}
	return func(context.Context) error {
		for _, stop := range stops {
			stop()
		}
		return nil
	}, nil
}

// expire gives one program an SVID that soon expires, and no other. The expiry counts as a cause
// only if every connection on the readiness socket was opened with it: an earlier connection
// ends with the certificates that it used.
func expire(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	who := fx.attestors(f.Arg)[0]
	offered := time.Now()
	end := who.offer(2 * time.Second)
	if who == fx.lbID {
		// Only a new connection uses the new SVID of the lb.
		bound, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		<-bound.Done()
		offered = time.Now()
		fx.frontendID.offer(longLife)
	}
	timerDone := make(chan struct{})
	quit := make(chan struct{})
	go func() {
		defer close(timerDone)
		timer := time.NewTimer(time.Until(end))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-quit:
			return
		}
		if old := fx.proxy.olderThan(offered); old > 0 {
			fx.out.note("%d connections did not move to the SVID that expires", old)
			return
		}
		fx.timeline.set("svid", down)
	}()
	return func(context.Context) error {
		close(quit)
		<-timerDone
		fx.lbID.offer(longLife)
		fx.frontendID.offer(longLife)
		fx.timeline.set("svid", healthy)
		return nil
	}, nil
}

// newAttestor makes a Workload API for an ID, which runs and offers an SVID.
func (fx *fixture) newAttestor(ca *identitytest.CA, name, id string) *attestor {
	a := &attestor{
		ca: ca, id: spiffeid.RequireFromString(id),
		api: identitytest.NewWorkloadAPIAt(fx.tb, fmt.Sprintf("%s/%s-api.sock", fx.Dir, name)),
	}
	a.offer(longLife)
	a.api.Start()
	return a
}

// attest makes the authority and the Workload APIs.
func (fx *fixture) attest() {
	ca := identitytest.NewCA(fx.tb, lab.TrustDomain)
	fx.lbID = fx.newAttestor(ca, "lb", lab.LBID)
	fx.frontendID = fx.newAttestor(ca, "frontend", lab.FrontendID)
}
