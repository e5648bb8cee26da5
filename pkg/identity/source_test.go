package identity_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/identitytest"
)

func TestStatusOverSVIDLifetime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := identitytest.NewCA(t, "example.org")
		journal, log := newJournal()
		src := identity.NewManualSource(identity.Options{Log: log})
		identitytest.Run(t, src)
		start := time.Now()
		at := func(d time.Duration) identity.Status {
			t.Helper()
			<-time.After(time.Until(start.Add(d)))
			synctest.Wait()
			return src.Status().Load()
		}
		src.Offer(ca.Bundle(), ca.SVID(ca.ID("/lb"), time.Hour))
		if st := at(40 * time.Minute); st.Err != nil || st.Overdue || st.Problem() != "" {
			t.Fatalf("at 2/3 of its life sharp, when some issuers renew: %+v", st)
		}
		src.Fail(errors.New("origin failed"))
		if st := at(43 * time.Minute); st.Err != nil || !st.Overdue ||
			!strings.HasSuffix(st.Problem(), "was not renewed: origin failed") {
			t.Fatalf("past 2/3 of its life: %+v: %s", st, st.Problem())
		}
		if n := journal.count(t, map[string]any{"msg": "SVID rotation overdue"}); n != 1 {
			t.Fatalf("%d lines about the missing rotation", n)
		}
		// At an odd time, so that no other timer fires at the end.
		at(50*time.Minute + 7*time.Second)
		src.Fail(errors.New("still origin failed"))
		if st := at(time.Hour); st.Err != nil {
			t.Fatalf("at NotAfter, which is part of its life: %+v", st)
		}
		st := at(time.Hour + time.Millisecond)
		if !errors.Is(st.Err, identity.ErrExpired) || !errSays("the SVID spiffe://example.org/lb expired",
			"still origin failed")(st) {
			t.Fatalf("after NotAfter: %+v", st)
		}
		if st.Problem() != st.Err.Error() {
			t.Fatalf("the problem after NotAfter: %s", st.Problem())
		}
		if _, err := src.GetX509SVID(); !errors.Is(err, identity.ErrExpired) {
			t.Fatalf("got %v", err)
		}
		if n := journal.count(t, map[string]any{"msg": "no usable SVID", "level": "ERROR"}); n != 1 {
			t.Fatalf("%d lines about the expiry", n)
		}
		src.Offer(ca.Bundle(), ca.SVID(ca.ID("/lb"), time.Hour))
		if st := at(time.Hour + time.Second); st.Err != nil || st.RenewalErr != nil || st.Problem() != "" ||
			st.Rotations != 1 {
			t.Fatalf("after a late rotation: %+v", st)
		}
	})
}

func TestInvalidSVIDReplacesNoValidOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := identitytest.NewCA(t, "example.org")
		src := identity.NewManualSource(identity.Options{})
		identitytest.Run(t, src)
		now := time.Now()
		id := ca.ID("/lb")
		good := ca.SVID(id, time.Hour)
		future := ca.SVIDBetween(id, now.Add(10*time.Minute), now.Add(2*time.Hour))
		past := ca.SVIDBetween(id, now.Add(-time.Hour), now.Add(-time.Minute))

		src.Offer(ca.Bundle(), past)
		if st := src.Status().Load(); !errors.Is(st.Err, identity.ErrExpired) || st.Serial != serialOf(past) ||
			st.Failures != 1 {
			t.Fatalf("an expired one: %+v", st)
		}
		select {
		case <-src.Ready():
			t.Fatal("ready with an expired SVID")
		default:
		}
		src.Offer(ca.Bundle(), good)
		src.Offer(ca.Bundle(), past)
		if st := src.Status().Load(); st.Err != nil || st.Serial != serialOf(good) ||
			!errors.Is(st.RenewalErr, identity.ErrExpired) {
			t.Fatalf("an expired one after a good one: %+v", st)
		}
		src.Offer(ca.Bundle(), future)
		if st := src.Status().Load(); st.Err != nil || st.Serial != serialOf(good) || st.RenewalErr != nil {
			t.Fatalf("a future one after a good one: %+v", st)
		}
		<-time.After(10*time.Minute + time.Millisecond)
		synctest.Wait()
		if st := src.Status().Load(); st.Serial != serialOf(future) || st.Rotations != 2 {
			t.Fatalf("the future has come: %+v", st)
		}
	})
}

func TestFirstSVIDNotYetValid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := identitytest.NewCA(t, "example.org")
		src := identity.NewManualSource(identity.Options{})
		identitytest.Run(t, src)
		now := time.Now()
		src.Offer(ca.Bundle(), ca.SVIDBetween(ca.ID("/lb"), now.Add(5*time.Second), now.Add(time.Hour)))
		if st := src.Status().Load(); !errors.Is(st.Err, identity.ErrNotYetValid) {
			t.Fatalf("got %+v", st)
		}
		<-src.Ready()
		if d := time.Since(now); d > 6*time.Second {
			t.Fatalf("ready after %v", d)
		}
	})
}
