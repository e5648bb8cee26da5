package identity_test

import (
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
)

func workloadSource(t *testing.T, api *identitytest.WorkloadAPI, o identity.Options) *identity.Source {
	t.Helper()
	t.Setenv("SPIFFE_ENDPOINT_SOCKET", api.Addr())
	src, err := identity.NewWorkloadAPI(o)
	must(t, err)
	return src
}

func usable(s identity.Status) bool { return s.Err == nil }

func errSays(words ...string) func(identity.Status) bool {
	return func(s identity.Status) bool { return s.Err != nil && containsAll(s.Err.Error(), words...) }
}

func renewalSays(words ...string) func(identity.Status) bool {
	return func(s identity.Status) bool {
		return s.RenewalErr != nil && containsAll(s.RenewalErr.Error(), words...)
	}
}

func containsAll(s string, words ...string) bool {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return false
		}
	}
	return true
}

func serialOf(svid *x509svid.SVID) string { return svid.Certificates[0].SerialNumber.Text(16) }

func TestWorkloadAPIRotation(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	api := identitytest.NewWorkloadAPI(t)
	first := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{first})
	api.Start()
	src := workloadSource(t, api, identity.Options{})
	if _, err := src.GetX509SVID(); err == nil {
		t.Fatal("an SVID before the source ran")
	}
	identitytest.Run(t, src)
	st := identitytest.WaitStatus(t, src, "usable", usable)
	select {
	case <-src.Ready():
	default:
		t.Fatal("usable, but not ready")
	}
	if st.ID != ca.ID("/lb") || st.Serial != serialOf(first) || !st.NotAfter.Equal(first.Certificates[0].NotAfter) ||
		st.Rotations != 0 {
		t.Fatalf("got %+v", st)
	}
	if b, err := src.GetX509BundleForTrustDomain(ca.ID("/lb").TrustDomain()); err != nil || !b.Equal(ca.Bundle()) {
		t.Fatalf("bundle %v: %v", b, err)
	}

	second := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{second})
	identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool {
		return s.Serial == serialOf(second) && s.Rotations == 1
	})
	if got, err := src.GetX509SVID(); err != nil || serialOf(got) != serialOf(second) {
		t.Fatalf("got %v, %v", got, err)
	}
	// The same SVID again is not a rotation.
	api.Offer(ca, []*x509svid.SVID{second})
	third := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{third})
	st = identitytest.WaitStatus(t, src, "rotated again",
		func(s identity.Status) bool { return s.Serial == serialOf(third) })
	if st.Rotations != 2 {
		t.Fatalf("%d rotations", st.Rotations)
	}
}

func TestWorkloadAPIAbsentThenLate(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	api := identitytest.NewWorkloadAPI(t)
	src := workloadSource(t, api, identity.Options{})
	identitytest.Run(t, src)
	// The reason names the missing file, and the attempts are counted.
	identitytest.WaitStatus(t, src, "failing", func(s identity.Status) bool {
		return s.Failures >= 3 && errSays(api.Addr(), "no such file")(s)
	})
	if _, err := src.GetX509SVID(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Fatalf("got %v", err)
	}
	api.Start()
	identitytest.WaitStatus(t, src, "denied", errSays("registration entry", "no identity issued"))
	api.Offer(ca, []*x509svid.SVID{ca.SVID(ca.ID("/lb"), time.Hour)})
	st := identitytest.WaitStatus(t, src, "usable", usable)
	if st.RenewalErr != nil {
		t.Fatalf("still %v", st.RenewalErr)
	}
}

func TestRunEndsWithMuteWorkloadAPI(t *testing.T) {
	api := identitytest.NewWorkloadAPI(t)
	src := workloadSource(t, api, identity.Options{})
	api.Mute()
	api.Start()
	stop := identitytest.Run(t, src)
	api.WaitStreams(1)
	if st := src.Status().Load(); st.Err == nil || st.Failures > 0 {
		t.Errorf("got %+v of an API that says nothing", st)
	}
	stop() // hangs if Run does not end
}

func TestSVIDOutlivesWorkloadAPI(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	api := identitytest.NewWorkloadAPI(t)
	first := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{first})
	api.Start()
	src := workloadSource(t, api, identity.Options{})
	identitytest.Run(t, src)
	identitytest.WaitStatus(t, src, "usable", usable)

	for _, step := range []struct {
		name string
		act  func()
		says string
	}{
		{"stopped", api.Stop, "Unavailable"},
		{"denying", func() { api.Deny(); api.Start() }, "no identity issued"},
		{"cancelling", func() { api.Fail(status.Error(codes.Canceled, "agent says cancelled")) }, "agent says cancelled"},
		{"refusing", func() { api.Fail(status.Error(codes.InvalidArgument, "agent says invalid")) }, "agent says invalid"},
		{"garbling", api.Garble, "certificate"},
	} {
		step.act()
		st := identitytest.WaitStatus(t, src, step.name, renewalSays(step.says))
		if st.Err != nil || st.Serial != serialOf(first) {
			t.Fatalf("%s: the last SVID was dropped: %+v", step.name, st)
		}
		if svid, err := src.GetX509SVID(); err != nil || serialOf(svid) != serialOf(first) {
			t.Fatalf("%s: %v, %v", step.name, svid, err)
		}
	}

	second := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{second})
	st := identitytest.WaitStatus(t, src, "recovered",
		func(s identity.Status) bool { return s.Serial == serialOf(second) })
	if st.RenewalErr != nil || st.Rotations != 1 {
		t.Fatalf("got %+v", st)
	}
}

func TestSeveralSVIDsOffered(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	a, b := ca.SVID(ca.ID("/a"), time.Hour), ca.SVID(ca.ID("/b"), time.Hour)
	b2 := ca.SVID(ca.ID("/b"), time.Hour)
	for _, c := range []struct {
		name    string
		offered []*x509svid.SVID
		want    string // path of the source's ID
		serial  string
		says    []string
	}{
		{"one and no wish", []*x509svid.SVID{a}, "", serialOf(a), nil},
		{"picked by ID", []*x509svid.SVID{a, b}, "/b", serialOf(b), nil},
		{"the first of one ID", []*x509svid.SVID{b2, b}, "", serialOf(b2), nil},
		{"no wish", []*x509svid.SVID{a, b}, "", "", []string{
			"2 SPIFFE IDs",
			"spiffe://example.org/a, spiffe://example.org/b", "--spiffe-id",
		}},
		{
			"not offered",
			[]*x509svid.SVID{a, b},
			"/c", "",
			[]string{"does not offer spiffe://example.org/c", "spiffe://example.org/a, spiffe://example.org/b"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			api := identitytest.NewWorkloadAPI(t)
			api.Offer(ca, c.offered)
			api.Start()
			var o identity.Options
			if c.want != "" {
				o.ID = ca.ID(c.want)
			}
			src := workloadSource(t, api, o)
			identitytest.Run(t, src)
			if c.says == nil {
				st := identitytest.WaitStatus(t, src, "usable", usable)
				if st.Serial != c.serial {
					t.Fatalf("got %+v", st)
				}
				return
			}
			identitytest.WaitStatus(t, src, "refused", errSays(c.says...))
			// The SVID with the source's ID is offered later.
			want := ca.ID(strings.TrimSuffix("/a"+c.want, "/c"))
			if c.want != "" {
				want = ca.ID(c.want)
			}
			api.Offer(ca, []*x509svid.SVID{ca.SVID(want, time.Hour)})
			if st := identitytest.WaitStatus(t, src, "usable", usable); st.ID != want {
				t.Fatalf("got %+v", st)
			}
		})
	}
}

func TestIdleStreamIsReopened(t *testing.T) {
	ca := identitytest.NewCA(t, "example.org")
	api := identitytest.NewWorkloadAPI(t)
	now := time.Now()
	old := ca.SVIDBetween(ca.ID("/lb"), now.Add(-time.Hour), now.Add(10*time.Minute))
	api.Offer(ca, []*x509svid.SVID{old})
	api.Start()
	src := workloadSource(t, api, identity.Options{})
	identity.SetIdleTimeout(src, 20*time.Millisecond)
	identitytest.Run(t, src)
	identitytest.WaitStatus(t, src, "overdue", func(s identity.Status) bool { return s.Overdue && s.Err == nil })
	api.Mute()
	before := api.Streams()
	identitytest.WaitStatus(t, src, "reopened", func(identity.Status) bool { return api.Streams() > before+1 })
	fresh := ca.SVID(ca.ID("/lb"), time.Hour)
	api.Offer(ca, []*x509svid.SVID{fresh})
	identitytest.WaitStatus(t, src, "rotated", func(s identity.Status) bool {
		return s.Serial == serialOf(fresh) && !s.Overdue
	})
}

func TestWorkloadAPIAddress(t *testing.T) {
	for addr, says := range map[string]string{
		"":                "SPIFFE_ENDPOINT_SOCKET",
		"/run/agent.sock": "scheme",
		"unix://":         "must include a path",
	} {
		t.Setenv("SPIFFE_ENDPOINT_SOCKET", addr)
		_, err := identity.NewWorkloadAPI(identity.Options{})
		harness.WantError(t, err, says)
	}
	t.Setenv("SPIFFE_ENDPOINT_SOCKET", "unix:///run/agent.sock")
	src, err := identity.NewWorkloadAPI(identity.Options{})
	must(t, err)
	if got := src.String(); got != "identity from the Workload API at unix:///run/agent.sock" {
		t.Errorf("got %q", got)
	}
}
