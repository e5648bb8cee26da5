package registry

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

var _ task.Task = (*Registry)(nil)

var (
	alice       = caller{spiffeid.RequireFromString("spiffe://example.org/ns/a/sa/alice")}
	bob         = caller{spiffeid.RequireFromString("spiffe://example.org/ns/b/sa/bob")}
	theOperator = caller{}
)

// localFixture is a registry without a server, with the offers taken from it.
type localFixture struct {
	*Registry
	t     *testing.T
	offer targetset.Offers
	stop  func()
}

func allowances(t *testing.T, list ...string) Allowances {
	t.Helper()
	var all Allowances
	for _, s := range list {
		a, err := ParseAllowance(s)
		harness.Must(t, err)
		all = append(all, a)
	}
	return all
}

var testStreams = []trench.Stream{
	{Name: "s", Check: testCheck, DrainTime: 10 * time.Second},
	{Name: "other", Check: testCheck, DrainTime: 10 * time.Second},
	{Name: "unchecked"},
}

// newLocalFixture runs a registry with streams until the test ends or stop is called.
func newLocalFixture(t *testing.T, o Options) *localFixture {
	t.Helper()
	if o.Allow == nil {
		o.Allow = allowances(t, "spiffe://example.org/ns/*/sa/*")
	}
	if o.Grace == 0 {
		o.Grace = 5 * time.Second
	}
	r := New(o)
	r.Configure(testStreams, targetset.AddressPolicy{})
	c := &localFixture{Registry: r, t: t, offer: targetset.Offers{}}
	c.stop = harness.Run(t, func(ctx context.Context) error { return task.Guard(ctx, r.String(), r.Run) })
	<-r.Ready()
	return c
}

// announce parses "a=10.0.0.1 b=10.0.0.2,fd00::2".
func announce(stream, targets string) announcement {
	a := announcement{stream: stream}
	for word := range strings.FieldsSeq(targets) {
		name, addresses, _ := strings.Cut(word, "=")
		t := trench.Target{Name: name}
		for s := range strings.SplitSeq(addresses, ",") {
			t.IPs = append(t.IPs, netip.MustParseAddr(s))
		}
		a.targets = append(a.targets, t)
	}
	return a
}

func (c *localFixture) register(who caller, stream, targets string) *call {
	c.t.Helper()
	call, err := c.open(who, announce(stream, targets))
	if err != nil {
		c.t.Fatalf("register %s: %v", targets, err)
	}
	return call
}

// changes reports whether Take returned changes.
func (c *localFixture) changes() bool {
	select {
	case <-c.Changed():
	default:
		return false
	}
	changed := c.Take()
	for stream, list := range changed {
		c.offer[stream] = list
	}
	return len(changed) > 0
}

// offers wants exactly these: "NAME ADDRESSES [STAY CAUSE SECONDS-LEFT]".
func (c *localFixture) offers(stream string, want ...string) {
	c.t.Helper()
	c.changes()
	var got []string
	for _, o := range c.offer[stream] {
		s := fmt.Sprintf("%s %s", o.Name, strings.ReplaceAll(strings.Trim(fmt.Sprint(o.IPs), "[]"), " ", ", "))
		switch o.Lifecycle {
		case targetset.Leaving:
			s += fmt.Sprintf(" leaving %v", time.Until(o.DrainEnd))
		case targetset.Terminating:
			s += fmt.Sprintf(" terminating %v", time.Until(o.DrainEnd))
		}
		if o.Cause != "" {
			s += ": " + o.Cause
		}
		got = append(got, s)
	}
	if !slices.Equal(got, want) {
		c.t.Fatalf("offered\n%q\nwant\n%q", got, want)
	}
}

func (c *localFixture) refuses(what string, err error, want string) {
	c.t.Helper()
	if err == nil {
		c.t.Errorf("%s: no error, want %s", what, want)
	} else if s := fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message()); !strings.Contains(s, want) {
		c.t.Errorf("%s:\n%s\nwant\n%s", what, s, want)
	}
}

func TestReturnWithinGraceChangesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain})
		defer c.stop()
		call := c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2,fd00::2")
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2, fd00::2")
		for range 5 {
			c.hangUp(call)
			advance(4900 * time.Millisecond)
			call = c.register(alice, "s", "b=fd00::2,10.0.0.2 a=10.0.0.1")
			advance(time.Minute)
			if c.changes() {
				t.Fatalf("a change was reported: %v", c.offer)
			}
		}
	})
}

func TestEndOfGrace(t *testing.T) {
	for onGone, steps := range map[targetset.SourceGonePolicy][3][]string{
		targetset.Drain: {
			{"a 10.0.0.1 leaving 10s: its registration ended"},
			{"a 10.0.0.1 leaving 1s: its registration ended"},
			nil,
		},
		targetset.Drop: {nil, nil, nil},
		targetset.Hold: {
			{"a 10.0.0.1: its registration ended"},
			{"a 10.0.0.1: its registration ended"},
			{"a 10.0.0.1: its registration ended"},
		},
	} {
		t.Run(string(onGone), func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				c := newLocalFixture(t, Options{OnGone: onGone})
				defer c.stop()
				c.hangUp(c.register(alice, "s", "a=10.0.0.1"))
				advance(4999 * time.Millisecond)
				c.offers("s", "a 10.0.0.1")
				advance(time.Millisecond)
				c.offers("s", steps[0]...)
				advance(9 * time.Second)
				c.offers("s", steps[1]...)
				advance(time.Hour)
				c.offers("s", steps[2]...)
				for _, o := range c.offer["s"] {
					if !o.DrainEnd.IsZero() {
						t.Errorf("a target that is held ends %v ago", time.Since(o.DrainEnd))
					}
				}
				// A new registration makes the target active again in every case.
				c.register(alice, "s", "a=10.0.0.1")
				c.offers("s", "a 10.0.0.1")
				advance(time.Hour)
				c.offers("s", "a 10.0.0.1")
			})
		})
	}
}

// A stall of the process at the end of a grace period extends it once: a new registration may wait
// to be read.
func TestStallExtendsGraceOnce(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drop})
		c.hangUp(c.register(alice, "s", "a=10.0.0.1"))
		c.stop() // the calls below replace its loop
		end := time.Now().Add(5 * time.Second)
		const stall = 3 * time.Second
		if next := c.expire(end.Add(stall), stall); !next.Equal(end.Add(2 * stall)) {
			t.Errorf("extended to %v after the end", next.Sub(end))
		}
		c.offers("s", "a 10.0.0.1")
		if next := c.expire(end.Add(3*stall), stall); !next.IsZero() {
			t.Errorf("extended again to %v after the end", next.Sub(end))
		}
		c.offers("s")
	})
}

func TestRequestedGrace(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drop})
		defer c.stop()
		for asked, granted := range map[time.Duration]time.Duration{
			0: 0, time.Second: time.Second,
			time.Hour: 5 * time.Second,
		} {
			a := announce("s", "a=10.0.0.1")
			a.grace = &asked
			call, err := c.open(alice, a)
			if err != nil || call.grace != granted {
				t.Fatalf("asked for %v: %v, %v", asked, call.grace, err)
			}
			c.hangUp(call)
			if granted > 0 {
				advance(granted - time.Millisecond)
				c.offers("s", "a 10.0.0.1")
				advance(time.Millisecond)
			}
			synctest.Wait()
			c.offers("s")
		}
	})
}

func TestDeregisteredTargetsDrain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain})
		defer c.stop()
		call := c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2 c=10.0.0.3")
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2", "c 10.0.0.3")
		if d, err := c.deregister(alice, "s", []string{"b"}, nil); err != nil || d != 10*time.Second {
			t.Fatal(d, err)
		}
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2 terminating 10s: deregistered", "c 10.0.0.3")
		// A second Deregister may shorten the drain, but not extend it.
		if _, err := c.deregister(alice, "s", []string{"b"}, new(time.Hour)); err != nil {
			t.Fatal(err)
		}
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2 terminating 10s: deregistered", "c 10.0.0.3")
		if _, err := c.deregister(alice, "s", []string{"b"}, new(2*time.Second)); err != nil {
			t.Fatal(err)
		}
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2 terminating 2s: deregistered", "c 10.0.0.3")
		advance(2 * time.Second)
		c.offers("s", "a 10.0.0.1", "c 10.0.0.3")
		if held, gone, taken := c.holding(call); len(held) != 2 || !slices.Equal(gone, []string{"b"}) {
			t.Fatal(held, gone, taken)
		}
		// The operator may deregister any target, and a drain time of 0 removes it immediately.
		if _, err := c.deregister(theOperator, "s", []string{"a", "c", "a"}, new(time.Duration(0))); err != nil {
			t.Fatal(err)
		}
		c.offers("s")
		if held, gone, taken := c.holding(call); len(held) != 0 || len(gone) != 2 || taken != "" {
			t.Fatal(held, gone, taken)
		}
		// A drain continues when the call ends.
		call = c.register(alice, "s", "a=10.0.0.1")
		if _, err := c.deregister(alice, "s", []string{"a"}, new(20*time.Second)); err != nil {
			t.Fatal(err)
		}
		c.hangUp(call)
		advance(19 * time.Second)
		c.offers("s", "a 10.0.0.1 terminating 1s: deregistered")
		advance(time.Second)
		c.offers("s")
	})
}

func TestNewerCallTakesOver(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drop})
		defer c.stop()
		first := c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2")
		second := c.register(alice, "s", "a=10.0.0.7")
		c.offers("s", "a 10.0.0.7", "b 10.0.0.2")
		if held, gone, taken := c.holding(first); len(held) != 1 || len(gone) != 0 {
			t.Fatal(held, gone, taken)
		}
		// Addresses may change places within a call.
		third := c.register(alice, "s", "b=10.0.0.7 a=10.0.0.2")
		c.offers("s", "a 10.0.0.2", "b 10.0.0.7")
		for _, address := range []string{"10.0.0.2", "10.0.0.7"} {
			_, err := c.open(alice, announce("s", "x="+address))
			c.refuses(address, err, "AlreadyExists")
		}
		c.register(alice, "other", "x=10.0.0.2")
		for _, old := range []*call{first, second} {
			if held, _, taken := c.holding(old); len(held) != 0 || taken == "" {
				t.Fatal(held, taken)
			}
			c.hangUp(old) // a call without targets has no effect when it ends
		}
		advance(time.Hour)
		c.offers("s", "a 10.0.0.2", "b 10.0.0.7")
		c.hangUp(third)
		advance(time.Hour)
		c.offers("s")
	})
}

func TestRefusalsChangeNothing(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain, Quota: 4})
		c.maxTargets = 6
		defer c.stop()
		c.Configure(append(slices.Clone(testStreams),
			trench.Stream{Name: "six", Check: trench.Check{
				SingleCheck: trench.SingleCheck{TCP: trench.TCPCheck{Port: 1}}, Families: trench.OnlyIPv6,
			}}),
			targetset.AddressPolicy{Subnets: []netip.Prefix{
				netip.MustParsePrefix("10.0.0.0/8"),
				netip.MustParsePrefix("fd00::/8"),
			}, VIPs: []vip.VIP{vip.Require("10.9.9.9/32")}, Gateways: []netip.Addr{netip.MustParseAddr("10.9.9.1")}})
		c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2")
		for _, tt := range []struct {
			who             caller
			stream, targets string
			want            string
		}{
			{
				alice, "nowhere", "x=10.0.0.9",
				`NotFound: the trench file has no stream "nowhere": use one of other, s, six`,
			},
			{alice, "unchecked", "x=10.0.0.9", "FailedPrecondition: stream unchecked has no check"},
			{
				alice, "six", "x=10.0.0.9",
				"InvalidArgument: target x has no address of a family that the check of stream six looks at",
			},
			{
				bob, "s", "x=10.0.0.9 a=10.0.0.1",
				"AlreadyExists: target a of stream s is registered by another identity: use another name",
			},
			{theOperator, "s", "a=10.0.0.1", "AlreadyExists: target a of stream s is registered by " + alice.String()},
			{alice, "s", "x=10.0.0.2", "AlreadyExists: target x: 10.0.0.2 is the address of target b of this stream"},
			{bob, "s", "x=10.0.0.2", "AlreadyExists: target x: 10.0.0.2 is the address of target b of this stream"},
			{
				alice, "s", "x=192.168.0.1",
				"InvalidArgument: target x: 192.168.0.1 is not in a subnet that --target-subnet allows",
			},
			{
				alice, "s", "x=10.0.0.9,2001:db8::1",
				"InvalidArgument: target x: 2001:db8::1 is not in a subnet that --target-subnet allows",
			},
			{alice, "s", "x=10.9.9.9", "InvalidArgument: target x: 10.9.9.9 lies in the VIP 10.9.9.9/32"},
			{alice, "s", "x=10.9.9.1", "InvalidArgument: target x: 10.9.9.1 belongs to a gateway"},
			{alice, "s", "x=127.0.0.1", "InvalidArgument: target x: 127.0.0.1 is a loopback address: register another one"},
			{alice, "s", "x=169.254.169.254", "InvalidArgument: target x: 169.254.169.254 is an IPv4 link-local address"},
			{alice, "s", "x=224.0.0.1", "InvalidArgument: target x: 224.0.0.1 is a multicast"},
			{
				alice, "s", "c=10.0.0.3 d=10.0.0.4 e=10.0.0.5",
				"ResourceExhausted: " + alice.String() + " has 2 targets, those that drain among them, and may have 4",
			},
			{
				theOperator, "s", "c=10.0.0.3 d=10.0.0.4 e=10.0.0.5 f=10.0.0.6 g=10.0.0.7",
				"ResourceExhausted: 2 targets are registered, the limit is 6",
			},
		} {
			_, err := c.open(tt.who, announce(tt.stream, tt.targets))
			c.refuses(tt.targets+" in "+tt.stream, err, tt.want)
		}
		_, err := c.deregister(bob, "s", []string{"a"}, new(time.Duration(0)))
		c.refuses("bob's deregistration", err,
			"PermissionDenied: target a of stream s is registered by another identity")
		_, err = c.deregister(alice, "s", []string{"a", "x"}, new(time.Duration(0)))
		c.refuses("a deregistration of an unknown target", err, `NotFound: stream "s" has no registered target "x"`)
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2")
		if s := c.State(); s.Name != "registry" || !s.Live || s.Detail != "2 targets of 1 caller, 4 each at most" ||
			len(s.Problems) != 0 {
			t.Errorf("%+v", s)
		}
		// Targets up to the quota are accepted, and the same address in another stream.
		c.register(alice, "s", "c=10.0.0.3")
		c.register(alice, "other", "a=10.0.0.1")
		c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2")
	})
}

// A pod is replaced by another one that gets its address.
func TestReplacementTakesAddress(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain, Quota: 1})
		defer c.stop()
		c.hangUp(c.register(alice, "s", "old=10.0.0.1,fd00::1"))
		_, err := c.open(bob, announce("s", "new=10.0.0.1"))
		c.refuses("another owner", err, "AlreadyExists: target new: 10.0.0.1 is the address of target old")
		c.register(alice, "s", "new=10.0.0.1,fd00::1")
		c.offers("s", "new 10.0.0.1, fd00::1")
		advance(time.Hour)
		c.offers("s", "new 10.0.0.1, fd00::1")
		if s := c.State(); s.Detail != "1 target of 1 caller, 1 each at most" {
			t.Errorf("%+v", s)
		}
	})
}

func TestCallLimit(t *testing.T) {
	c := newLocalFixture(t, Options{Quota: 2})
	defer c.stop()
	var ends []func()
	for range 4 {
		done, err := c.begin(alice)
		harness.Must(t, err)
		ends = append(ends, done)
	}
	_, err := c.begin(alice)
	c.refuses("the fifth", err, "ResourceExhausted: "+alice.String()+" has 4 calls open")
	for _, who := range []caller{bob, theOperator, theOperator, theOperator, theOperator, theOperator} {
		done, err := c.begin(who)
		harness.Must(t, err)
		defer done()
	}
	ends[0]()
	done, err := c.begin(alice)
	harness.Must(t, err)
	done()
	for _, end := range ends[1:] {
		end()
	}
	if _, kept := c.calls[alice]; kept {
		t.Error("a caller without calls is remembered")
	}
}

func TestRegistrationsOutliveTheirStream(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain})
		defer c.stop()
		c.register(alice, "s", "a=10.0.0.1 b=10.0.0.2")
		c.register(alice, "other", "c=10.0.0.3")
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2")
		c.Configure(testStreams[1:], targetset.AddressPolicy{})
		c.offers("s")
		c.offers("other", "c 10.0.0.3")
		if p := c.State().Problems; !slices.Equal(p,
			[]string{"stream s is not in the trench file: 2 registered targets are not used (a, b)"}) {
			t.Errorf("%q", p)
		}
		unchecked := slices.Clone(testStreams)
		unchecked[0].Check = trench.Check{}
		c.Configure(unchecked, targetset.AddressPolicy{})
		c.offers("s")
		if p := c.State().Problems; !slices.Equal(p,
			[]string{"stream s has no check: 2 registered targets are not used (a, b)"}) {
			t.Errorf("%q", p)
		}
		c.Configure(testStreams, targetset.AddressPolicy{})
		c.offers("s", "a 10.0.0.1", "b 10.0.0.2")
		c.Configure(testStreams, targetset.AddressPolicy{})
		if c.changes() {
			t.Error("the same configuration is a change")
		}
	})
}

func TestRefusedAtStartAndStop(t *testing.T) {
	r := New(Options{Grace: time.Second})
	c := &localFixture{t: t}
	_, err := r.open(theOperator, announce("s", "a=10.0.0.1"))
	c.refuses("before", err, "Unavailable: the load balancer is starting")
	r.Configure(testStreams, targetset.AddressPolicy{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	harness.Must(t, task.Guard(ctx, r.String(), r.Run))
	_, err = r.open(theOperator, announce("s", "a=10.0.0.1"))
	c.refuses("after", err, "Unavailable: the load balancer is stopping")
	_, err = r.deregister(theOperator, "s", []string{"a"}, nil)
	c.refuses("after", err, "Unavailable: the load balancer is stopping")
	_, err = r.begin(alice)
	c.refuses("after", err, "Unavailable: the load balancer is stopping")
	err = (&Service{Registry: r, Operator: true}).serve(t.Context(), "Register", "s", func(caller) error { return err })
	c.refuses("served", err, "Unavailable: the load balancer is stopping")
	if n := r.Refused()[RefusedStopping]; n != 1 {
		t.Errorf("%d refusals are counted, want 1", n)
	}
}

func TestRegistryOff(t *testing.T) {
	c := newLocalFixture(t, Options{Off: true})
	defer c.stop()
	for _, who := range []caller{theOperator, alice} {
		_, err := c.open(who, announce("s", "a=10.0.0.1"))
		c.refuses(who.String(), err,
			"FailedPrecondition: the registry is not in use here: start lb with --source=registry")
	}
}

// stateIn returns the path of a state file, in a directory that does not exist yet.
func stateIn(t *testing.T) string { return filepath.Join(t.TempDir(), "state", "registry.json") }

func TestDeregisterDuringDrain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newLocalFixture(t, Options{OnGone: targetset.Drain})
		defer c.stop()
		c.hangUp(c.register(alice, "s", "a=10.0.0.1"))
		advance(7 * time.Second)
		c.offers("s", "a 10.0.0.1 leaving 8s: its registration ended")
		if _, err := c.deregister(alice, "s", []string{"a"}, new(time.Hour)); err != nil {
			t.Fatal(err)
		}
		c.offers("s", "a 10.0.0.1 terminating 8s: deregistered")
	})
}
