package registry

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestRegisterOverMutualTLS(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Millisecond, OnGone: targetset.Drop})
	for _, address := range []string{h.unix, h.tcp} {
		c, conn := h.dial(address, alice.id)
		l := h.mustRegister(c, "s", "a=10.0.0.1,fd00::1")
		if l.grace != time.Millisecond {
			t.Errorf("the grace is %v", l.grace)
		}
		l.until("10.0.0.1", isReady)
		l.until("fd00::1", isReady)
		list, err := c.List(t.Context(), &targetv1.ListRequest{})
		if err != nil || len(list.GetTargets()) != 2 || list.GetTargets()[0].GetRegisteredBy() != alice.String() ||
			list.GetTargets()[0].GetSources()[0] != "registry" {
			t.Fatalf("%v, %v", list, err)
		}
		// The connection is lost: the registration ends.
		harness.Must(t, conn.Close())
		await.True(t, "the end of the registration", func() bool { return len(h.index.List(nil)) == 0 })
	}
}

func TestDeregisterIsSentToItsCall(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute, OnGone: targetset.Drain})
	c, _ := h.dial(h.unix, alice.id)
	l := h.mustRegister(c, "s", "a=10.0.0.1 b=10.0.0.2")
	l.until("10.0.0.1", isReady)
	r, err := c.Deregister(t.Context(), &targetv1.DeregisterRequest{
		Stream: "s", Names: []string{"a"},
		DrainFor: durationpb.New(time.Hour),
	})
	if err != nil || r.GetDrainFor().AsDuration() != time.Hour {
		t.Fatal(r, err)
	}
	l.until("10.0.0.1", isDraining)
	r, err = c.Deregister(t.Context(), &targetv1.DeregisterRequest{
		Stream: "s", Names: []string{"b", "a"},
		DrainFor: durationpb.New(time.Millisecond),
	})
	if err != nil || r.GetDrainFor().AsDuration() != time.Millisecond {
		t.Fatal(r, err)
	}
	if err := l.over(); !errors.Is(err, io.EOF) {
		t.Errorf("it ended with %v", err)
	}
	if l.states["10.0.0.1"] != isGone || l.states["10.0.0.2"] != isGone {
		t.Errorf("the last states are %v", l.states)
	}
	await.True(t, "an empty index", func() bool { return len(h.index.List(nil)) == 0 })
}

func TestOlderCallIsAborted(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute, OnGone: targetset.Drop})
	c, _ := h.dial(h.unix, alice.id)
	first := h.mustRegister(c, "s", "a=10.0.0.1 b=10.0.0.2")
	again, _ := h.dial(h.tcp, alice.id)
	h.mustRegister(again, "s", "a=10.0.0.1")
	second := h.mustRegister(again, "s", "b=10.0.0.3")
	if err := first.over(); status.Code(err) != codes.Aborted ||
		status.Convert(err).Message() != "another call registered b" {
		t.Errorf("it ended with %v", err)
	}
	for address, state := range first.states {
		if state == isGone {
			t.Errorf("%s is sent as gone to the call that it left for another", address)
		}
	}
	second.until("10.0.0.3", isReady)
	await.True(t, "the new address", func() bool {
		list := h.index.List(nil)
		return len(list) == 2 && list[1].Addr.String() == "10.0.0.3"
	})
}

// A call gets no states of a target that another call took.
func TestTakenTargetIsOfNewerCall(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute, OnGone: targetset.Drain})
	c, _ := h.dial(h.unix, alice.id)
	first := h.mustRegister(c, "s", "a=10.0.0.1 b=10.0.0.2")
	first.until("10.0.0.1", isReady)
	again, _ := h.dial(h.tcp, alice.id)
	second := h.mustRegister(again, "s", "a=10.0.0.1")
	deregister := func(name, address string, l *openCall) {
		t.Helper()
		r := &targetv1.DeregisterRequest{Stream: "s", Names: []string{name}, DrainFor: durationpb.New(time.Hour)}
		if _, err := c.Deregister(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		l.until(address, isDraining)
	}
	deregister("a", "10.0.0.1", second)
	deregister("b", "10.0.0.2", first)
	if state := first.states["10.0.0.1"]; state == isDraining {
		t.Errorf("the call that lost a gets its state %v", state)
	}
}

func TestRefusedRequests(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute})
	begin := time.Now()
	c, _ := h.dial(h.unix, alice.id)
	admin, _ := h.dial(h.admin, spiffeid.ID{})
	h.mustRegister(admin, "other", "taken=10.0.0.200")
	many := request("s", "")
	for i := range MaxTargetsPerCall + 1 {
		many.Targets = append(many.Targets, &targetv1.Target{
			Name:      fmt.Sprint("t", i),
			Addresses: []string{fmt.Sprintf("10.1.%d.%d", i/200, i%200+1)},
		})
	}
	withGrace := func(d *durationpb.Duration) *targetv1.RegisterRequest {
		r := request("s", "a=10.0.0.1")
		r.Grace = d
		return r
	}
	for _, tt := range []struct {
		client targetv1.TargetServiceClient
		req    *targetv1.RegisterRequest
		code   codes.Code
		want   string
	}{
		{
			c, request("other", "a=10.0.0.1"), codes.PermissionDenied,
			alice.String() + ` may not register targets of stream "other": have it allowed by --target-id`,
		},
		{c, request("nowhere", "a=10.0.0.1"), codes.PermissionDenied, `stream "nowhere"`},
		{admin, request("nowhere", "a=10.0.0.1"), codes.NotFound, "use one of other, s"},
		{admin, request(strings.Repeat("x", 10_000), "a=10.0.0.1"), codes.NotFound, "x…"},
		{admin, request("unchecked", "a=10.0.0.1"), codes.FailedPrecondition, "stream unchecked has no check"},
		{
			admin, request("other", "taken2=10.0.0.200"), codes.AlreadyExists,
			"10.0.0.200 is the address of target taken",
		},
		{c, request("s", ""), codes.InvalidArgument, "no target is named: name 1 to 1000"},
		{c, many, codes.InvalidArgument, "1001 targets in one call"},
		{c, request("s", "a=10.0.0.1 a=10.0.0.2"), codes.InvalidArgument, "target a is there twice"},
		{
			c, request("s", "a=10.0.0.1 b=10.0.0.1"), codes.InvalidArgument,
			"target b: 10.0.0.1 is the address of target a as well",
		},
		{c, request("s", "a/b=10.0.0.1"), codes.InvalidArgument, `a target "a/b" is not a name`},
		{c, request("s", "=10.0.0.1"), codes.InvalidArgument, "a target has no name"},
		{c, request("s", strings.Repeat("x", 61)+"=10.0.0.1"), codes.InvalidArgument, "is not a name"},
		{c, request("s", "a="), codes.InvalidArgument, `target a: "" is not an IP address`},
		{
			c, &targetv1.RegisterRequest{Stream: "s", Targets: []*targetv1.Target{{Name: "a"}}}, codes.InvalidArgument,
			"target a: it has 0 addresses",
		},
		{c, request("s", "a=10.0.0.1,fd00::1,fd00::2"), codes.InvalidArgument, "target a: it has 3 addresses"},
		{c, request("s", "a=10.0.0.1,10.0.0.2"), codes.InvalidArgument, "10.0.0.1 and 10.0.0.2 are of one family"},
		{c, request("s", "a=::ffff:10.0.0.1,10.0.0.2"), codes.InvalidArgument, "are of one family"},
		{c, request("s", "a=10.0.0.1/32"), codes.InvalidArgument, "without a prefix length"},
		{c, request("s", "a=::ffff:10.0.0.1"), codes.InvalidArgument, "write 10.0.0.1"},
		{c, request("s", "a=fe80::1"), codes.InvalidArgument, "link-local"},
		{c, request("s", "a=0.0.0.0"), codes.InvalidArgument, "unspecified"},
		{c, request("s", "a=fd00::1%eth0"), codes.InvalidArgument, "zone"},
		{c, withGrace(durationpb.New(-time.Second)), codes.InvalidArgument, "grace is -1s"},
		{c, withGrace(durationpb.New(2 * time.Hour)), codes.InvalidArgument, "0s to 1h0m0s may be asked for"},
		{c, withGrace(&durationpb.Duration{Seconds: 1 << 60}), codes.InvalidArgument, "grace"},
	} {
		_, err := h.register(tt.client, tt.req)
		if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v\nwant %v %s", err, tt.code, tt.want)
		}
	}
	many.Targets = many.Targets[:MaxTargetsPerCall]
	if a, err := parseAnnouncement(many); err != nil || len(a.targets) != MaxTargetsPerCall {
		t.Errorf("as many targets as a call may have: %v", err)
	}
	for _, tt := range []struct {
		req  *targetv1.DeregisterRequest
		code codes.Code
		want string
	}{
		{&targetv1.DeregisterRequest{Stream: "s"}, codes.InvalidArgument, "no target is named"},
		{&targetv1.DeregisterRequest{Stream: "s", Names: []string{"x"}}, codes.NotFound, `no registered target "x"`},
		{
			&targetv1.DeregisterRequest{Stream: "s", Names: []string{"x"}, DrainFor: durationpb.New(-1)},
			codes.InvalidArgument, "drain_for is -1ns",
		},
		// The error must not disclose the targets of a stream to an unauthorized caller.
		{
			&targetv1.DeregisterRequest{Stream: "other", Names: []string{"taken"}}, codes.PermissionDenied,
			"may not register targets of stream",
		},
		{
			&targetv1.DeregisterRequest{Stream: "other", Names: []string{"x"}}, codes.PermissionDenied,
			"may not register targets of stream",
		},
	} {
		_, err := c.Deregister(t.Context(), tt.req)
		if status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: got %v, want %v %s", tt.req, err, tt.code, tt.want)
		}
	}
	if all := h.index.List(func(k healthcheck.Key) bool { return k.Stream == "s" }); len(all) != 0 {
		t.Errorf("something is registered: %v", all)
	}
	counts := h.Refused()
	for _, why := range []Refusal{
		RefusedIdentity, RefusedStream, RefusedConflict, RefusedInput, RefusedAddress,
		RefusedUnknown,
	} {
		if counts[why] == 0 {
			t.Errorf("no refusal is counted as %s: %v", why, counts)
		}
	}
	most := 2*3 + int(time.Since(begin)/(10*time.Second)) // of two callers
	if lines := strings.Count(h.log.String(), "refused a call on targets"); lines == 0 || lines > most {
		t.Errorf("%d lines are logged, in a time for %d", lines, most)
	}
}

func TestQuotaOfCaller(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute, Quota: 3})
	c, _ := h.dial(h.unix, alice.id)
	l := h.mustRegister(c, "s", "a=10.0.0.1 b=10.0.0.2 c=10.0.0.3")
	if _, err := h.register(c, request("s", "d=10.0.0.4")); status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "--target-quota") {
		t.Errorf("the fourth: %v", err)
	}
	admin, _ := h.dial(h.admin, spiffeid.ID{})
	h.mustRegister(admin, "s", "d=10.0.0.4 e=10.0.0.5 f=10.0.0.6 g=10.0.0.7")
	if _, err := c.Deregister(t.Context(), &targetv1.DeregisterRequest{
		Stream: "s", Names: []string{"a"},
		DrainFor: durationpb.New(0),
	}); err != nil {
		t.Fatal(err)
	}
	l.until("10.0.0.1", isGone)
	h.mustRegister(c, "s", "h=10.0.0.8")
}

// Ten IDs must fit into the neighbor table of a node, which has 1 024 entries.
func TestDefaultQuota(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute})
	c, _ := h.dial(h.unix, alice.id)
	var targets []string
	for i := range 101 {
		targets = append(targets, fmt.Sprintf("t%d=10.0.0.%d", i, i+1))
	}
	if _, err := h.register(c, request("s", strings.Join(targets, " "))); status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "--target-quota") {
		t.Errorf("101 targets: %v", err)
	}
	h.mustRegister(c, "s", strings.Join(targets[:100], " "))
}

func TestStatesOfTheProtocol(t *testing.T) {
	for s := healthcheck.Starting; s <= healthcheck.Left; s++ {
		info := filter{}.info(targetset.View{Health: healthcheck.Health{State: s}})
		want := "STATE_" + strings.ToUpper(strings.ReplaceAll(s.String(), " ", "_"))
		if info.GetState().String() != want {
			t.Errorf("%v is sent as %v, want %s", s, info.GetState(), want)
		}
	}
}

func TestVisibleTargets(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute})
	a, _ := h.dial(h.unix, alice.id)
	b, _ := h.dial(h.unix, bob.id)
	admin, _ := h.dial(h.admin, spiffeid.ID{})
	reader, _ := h.dial(h.tcp, h.ca.ID("/operator"))
	for _, l := range []*openCall{
		h.mustRegister(a, "s", "a=10.0.0.1"), h.mustRegister(b, "other", "b=10.0.0.1"),
		h.mustRegister(admin, "s", "c=10.0.0.3"),
	} {
		for address := range l.states {
			l.until(address, isReady)
		}
	}
	for name, tt := range map[string]struct {
		client targetv1.TargetServiceClient
		stream string
		want   string
	}{
		"alice":             {a, "", "s/a spiffe://example.org/ns/a/sa/alice, s/c "},
		"alice, her stream": {a, "s", "s/a spiffe://example.org/ns/a/sa/alice, s/c "},
		"alice, another":    {a, "other", "PermissionDenied"},
		"bob":               {b, "", "other/b spiffe://example.org/ns/b/sa/bob, s/a , s/c "},
		"the operator": {
			admin, "",
			"other/b spiffe://example.org/ns/b/sa/bob, s/a spiffe://example.org/ns/a/sa/alice, s/c operator",
		},
		"the operator, one":  {admin, "other", "other/b spiffe://example.org/ns/b/sa/bob"},
		"the operator, none": {admin, "nowhere", "NotFound"},
		"a reader": {
			reader, "",
			"other/b spiffe://example.org/ns/b/sa/bob, s/a spiffe://example.org/ns/a/sa/alice, s/c operator",
		},
		"a reader, one stream": {reader, "other", "other/b spiffe://example.org/ns/b/sa/bob"},
	} {
		t.Run(name, func(t *testing.T) {
			listed := func(all []*targetv1.TargetInfo, err error) string {
				if err != nil {
					return status.Code(err).String()
				}
				var words []string
				for _, i := range all {
					words = append(words, i.GetStream()+"/"+i.GetName()+" "+i.GetRegisteredBy())
				}
				return strings.Join(words, ", ")
			}
			r, err := tt.client.List(t.Context(), &targetv1.ListRequest{Stream: tt.stream})
			if got := listed(r.GetTargets(), err); got != tt.want {
				t.Errorf("List: %s\nwant: %s", got, tt.want)
			}
			w, err := tt.client.Watch(t.Context(), &targetv1.WatchRequest{Stream: tt.stream})
			harness.Must(t, err)
			m, err := w.Recv()
			if got := listed(m.GetTargets(), err); got != tt.want || (err == nil && !m.GetComplete()) {
				t.Errorf("Watch: %s\nwant: %s", got, tt.want)
			}
		})
	}
	if _, err := h.register(reader, request("s", "x=10.0.0.9")); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a reader registered: %v", err)
	}
	stranger, _ := h.dial(h.tcp, h.ca.ID("/stranger"))
	if _, err := stranger.List(t.Context(), &targetv1.ListRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a stranger was let in: %v", err)
	}
}

func TestPagesOfListAndWatch(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute, OnGone: targetset.Drop})
	admin, _ := h.dial(h.admin, spiffeid.ID{})
	const calls, each = 5, 900
	for i := range calls {
		r := request("s", "")
		for j := range each {
			r.Targets = append(r.Targets, &targetv1.Target{
				Name:      fmt.Sprintf("t-%d-%d", i, j),
				Addresses: []string{fmt.Sprintf("10.%d.%d.%d", i, j/250, j%250+1)},
			})
		}
		if _, err := h.register(admin, r); err != nil {
			t.Fatal(err)
		}
	}
	await.True(t, "all targets in the index", func() bool { return len(h.index.List(nil)) == calls*each })
	for _, size := range []uint32{0, 700, 5000} {
		seen, pages, previous := map[string]bool{}, 0, ""
		for token := ""; ; pages++ {
			r, err := admin.List(t.Context(), &targetv1.ListRequest{PageSize: size, PageToken: token})
			harness.Must(t, err)
			for _, i := range r.GetTargets() {
				if seen[i.GetName()] || i.GetName() <= previous {
					t.Fatalf("%s comes after %s", i.GetName(), previous)
				}
				seen[i.GetName()], previous = true, i.GetName()
			}
			if n := len(r.GetTargets()); n > maxPage || (size > 0 && n > int(size)) {
				t.Fatalf("%d targets in a page of %d", n, size)
			}
			if token = r.GetNextPageToken(); token == "" {
				break
			}
		}
		if len(seen) != calls*each {
			t.Errorf("pages of %d: %d targets in %d pages", size, len(seen), pages+1)
		}
	}
	for _, token := range []string{"x", "!", "YS9i", "YS9iL2M"} {
		if _, err := admin.List(t.Context(),
			&targetv1.ListRequest{PageToken: token}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("token %q: %v", token, err)
		}
	}
	w, err := admin.Watch(t.Context(), &targetv1.WatchRequest{})
	harness.Must(t, err)
	seen := map[string]targetv1.State{}
	for complete := false; !complete; {
		m, err := w.Recv()
		if err != nil || len(m.GetTargets()) > maxPage {
			t.Fatal(len(m.GetTargets()), err)
		}
		for _, i := range m.GetTargets() {
			seen[i.GetName()] = i.GetState()
		}
		complete = m.GetComplete()
	}
	if len(seen) != calls*each {
		t.Errorf("%d targets are watched", len(seen))
	}
	if _, err := admin.Deregister(t.Context(),
		&targetv1.DeregisterRequest{Stream: "s", Names: []string{"t-0-0"}, DrainFor: durationpb.New(0)}); err != nil {
		t.Fatal(err)
	}
	m, err := w.Recv()
	if err != nil || len(m.GetTargets()) != 1 || m.GetTargets()[0].GetName() != "t-0-0" ||
		m.GetTargets()[0].GetState() != isGone || m.GetComplete() {
		t.Errorf("%v, %v", m, err)
	}
}

func TestStopEndsCalls(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Minute})
	c, _ := h.dial(h.tcp, alice.id)
	l := h.mustRegister(c, "s", "a=10.0.0.1")
	w, err := c.Watch(t.Context(), &targetv1.WatchRequest{})
	harness.Must(t, err)
	if _, err := w.Recv(); err != nil {
		t.Fatal(err)
	}
	go h.stop()
	watched := func() error {
		for {
			if _, err := w.Recv(); err != nil {
				return err
			}
		}
	}
	late, again := h.register(c, request("s", "b=10.0.0.2")) // another: in time, it would take over the first one
	if again == nil {                                        // it was still in time
		again = late.over()
	}
	for what, err := range map[string]error{
		"the registration": l.over(), "the watch": watched(),
		"a new registration": again,
	} {
		if status.Code(err) != codes.Unavailable || status.Convert(err).Message() != "the load balancer is stopping" {
			t.Errorf("%s ended with %v", what, err)
		}
	}
}

// A thousand sidecars, each with one connection and one call, start simultaneously and die.
func TestThousandRegistrations(t *testing.T) {
	const n = 1000
	h := newFixture(t, Options{Grace: time.Millisecond, OnGone: targetset.Drop, StateFile: stateIn(t), Quota: n})
	c, conn := h.dial(h.unix, alice.id)
	var all sync.WaitGroup
	leases := make([]*openCall, n)
	for i := range n {
		all.Go(func() {
			var err error
			if leases[i], err = h.register(c,
				request("s", fmt.Sprintf("t%d=10.0.%d.%d", i, i/250, i%250+1))); err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for i, l := range leases {
		l.until(fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), isReady)
	}
	if s := h.State(); s.Detail != "1000 targets of 1 caller, 1000 each at most" {
		t.Errorf("%+v", s)
	}
	// One more is over the quota.
	if _, err := h.register(c, request("s", "more=10.1.0.1")); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
	harness.Must(t, conn.Close())
	await.True(t, "the end of all", func() bool {
		return len(h.index.List(nil)) == 0 && h.State().Detail == "0 targets of 0 callers, 1000 each at most"
	})
	await.True(t, "the end of all calls", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.calls) == 0
	})
}

// proxy forwards a TCP connection and can cut it without a FIN or RST to either end.
type proxy struct {
	address string
	cut     chan struct{}
}

func startProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	w := &proxy{address: l.Addr().String(), cut: make(chan struct{})}
	var all sync.WaitGroup
	all.Go(func() {
		near, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", to)
		if err != nil {
			t.Error(err)
			return
		}
		for _, ends := range [][2]net.Conn{{near, far}, {far, near}} {
			all.Go(func() { w.copy(ends[0], ends[1]) })
		}
		<-t.Context().Done()
		_, _ = near.Close(), far.Close()
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return w
}

// copy copies until an end is closed; data after the cut is lost.
func (w *proxy) copy(from, to net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		select {
		case <-w.cut:
		default:
			if err == nil {
				_, err = to.Write(buffer[:n])
			}
		}
		if err != nil {
			return
		}
	}
}

// The host of a caller vanishes without a FIN or RST.
func TestVanishedHostLosesItsTargets(t *testing.T) {
	h := newFixture(t, Options{Grace: time.Millisecond, OnGone: targetset.Drop})
	w := startProxy(t, h.tcp)
	c, _ := h.dial(w.address, alice.id)
	h.mustRegister(c, "s", "a=10.0.0.1").until("10.0.0.1", isReady)
	close(w.cut)
	await.True(t, "the end of the registration", func() bool { return len(h.index.List(nil)) == 0 })
}

// A caller that registers repeatedly, with or without a grace period, does not cause a log line for
// each call.
func TestRegistrationsAreThrottled(t *testing.T) {
	begin, h := time.Now(), newFixture(t, Options{Grace: time.Millisecond, OnGone: targetset.Drop})
	c, _ := h.dial(h.unix, alice.id)
	awaitEnd := func() {
		t.Helper()
		await.True(t, "the end of the registration", func() bool { return len(h.index.List(nil)) == 0 })
	}
	for range 20 {
		h.mustRegister(c, "s", "a=10.0.0.1").end()
		awaitEnd()
		l := h.mustRegister(c, "s", "a=10.0.0.1")
		if _, err := c.Deregister(t.Context(), &targetv1.DeregisterRequest{
			Stream: "s", Names: []string{"a"}, DrainFor: durationpb.New(time.Millisecond),
		}); err != nil {
			t.Fatal(err)
		}
		awaitEnd()
		l.end()
	}
	most := 3 + int(time.Since(begin)/(10*time.Second))
	for _, message := range []string{
		"targets registered", "registration ended", "registrations ended without a new one in their grace",
		"registered targets have drained and left",
	} {
		if lines := strings.Count(h.log.String(), message); lines == 0 || lines > most {
			t.Errorf("%d lines %q are logged, in a time for %d", lines, message, most)
		}
	}
}
