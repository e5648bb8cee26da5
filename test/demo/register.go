package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// registration returns the registration request of the application.
func (s *fixture) registration() string {
	return fmt.Sprintf(`{"stream":%q,"targets":[{"name":%q,"addresses":[%q,%q]}]}`, appStream, s.app.name, s.app.addrs[0],
		s.app.addrs[1])
}

// register has an application register its target: grpcurl's call is the lease.
func (t *scenario) register(ctx context.Context) error {
	svid, err := t.mint(lab.AppID)
	if err != nil {
		return err
	}
	if err := t.app.up(); err != nil {
		return err
	}
	t.printf("   %s listens, and the lb does not know it", t.app.name)
	const method = "vipgate.target.v1.TargetService/Register"
	t.printf(
		"   grpcurl -cert tls.crt -key tls.key \\\n      -d '%s' \\\n      unix://…/lb.sock %s", t.registration(), method,
	)
	return t.expectDecision(ctx, "the call runs as "+lab.AppID, func() (err error) {
		// grpcurl verifies host names, which an SVID does not have, so -insecure skips the check; the
		// lb verifies the client's SVID.
		t.grpcurl, err = t.lab.Start(t.lab.Backend, "grpcurl", filepath.Join(t.tools, "grpcurl"), "-insecure",
			"-cert", filepath.Join(svid, "tls.crt"), "-key", filepath.Join(svid,
				"tls.key"), "-d", t.registration(), "unix://"+t.pod.Socket(), method)
		if err == nil {
			t.guard(t.grpcurl)
		}
		return err
	}, append(t.vips(), t.app.vips...))
}

// leaseEnds kills the call and checks the effects: nothing for the grace, then 65535:0, then the
// withdrawal, and no update for the other VIPs.
func (t *scenario) leaseEnds(ctx context.Context) error {
	t.expectExit(t.grpcurl)
	t.printf(
		"   kill -9 %d (grpcurl); its target is kept for the grace of %v, in case it calls again", t.grpcurl.PID(), grace,
	)
	c := t.newChange(t.vips())
	if err := t.grpcurl.Kill(); err != nil {
		return err
	}
	bound, cancel := withTimeout(ctx)
	defer cancel()
	warned, err := t.watcher.Wait(bound, depreferred(t.app.vips))
	if err != nil {
		return err
	}
	t.printf("   after %s it drains, and the gateway receives the de-preferred routes:", short(warned.At.Sub(c.from)))
	t.show(c.before, warned)
	if c.after, err = t.watcher.Wait(bound, exactly(c.want)); err != nil {
		return err
	}
	t.printf("   after %s:", c.took())
	t.show(warned, c.after)
	if early := warned.At.Sub(c.from); early < grace {
		return fmt.Errorf("the target drained after %s, expected not before its grace of %v was over", short(early),
			grace)
	}
	// The lease ended without a failure of the application, which continues to listen.
	if err := errors.Join(inOrder(t.watcher.Since(c.from), t.app.vips, time.Now()), t.app.down()); err != nil {
		return err
	}
	if err := errors.Join(c.keptUntouched(t.watcher.Since(c.from)), t.wantNoUpdates(c), t.waitPause(ctx)); err != nil {
		return err
	}
	t.printf("   ok: the gateway received no update of %s", list(c.untouched()))
	return nil
}
