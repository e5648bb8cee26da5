package identity

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"golang.org/x/sync/errgroup"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
)

// wallCheck bounds how long a jump of the wall clock stays unseen in the Status.
const wallCheck = 30 * time.Second

// Options are the settings that the origins share. The zero value is usable.
type Options struct {
	// Addr is the address of the Workload API, such as
	// "unix:///run/spire/agent.sock". Empty: SPIFFE_ENDPOINT_SOCKET.
	Addr string
	// ID is our own SPIFFE ID. It picks ours when several SVIDs are offered; an
	// SVID with another ID is refused. Zero: whatever is offered, as long as it
	// is one ID only.
	ID spiffeid.ID
	// DevTTL is the life of an SVID of the development authority, at least
	// 2 s (certificates count in whole seconds). Zero: 1 h.
	DevTTL time.Duration
	// Poll is how often files are read again though no change was announced.
	// Zero: 5 s.
	Poll time.Duration
	// Log receives what happens to the SVID; nil: nothing is logged.
	Log *slog.Logger
}

func (o Options) withDefaults() Options {
	o.DevTTL = cmp.Or(o.DevTTL, time.Hour)
	o.Poll = cmp.Or(o.Poll, 5*time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

// Status tells about our own SVID.
type Status struct {
	// ID, Serial (hexadecimal), NotBefore and NotAfter are those of the SVID in
	// use, or of the last one when that has expired; zero before the first.
	ID                  spiffeid.ID
	Serial              string
	NotBefore, NotAfter time.Time
	// Rotations counts how often the SVID in use was replaced by another one.
	Rotations uint64
	// Err says why there is no usable SVID; nil while there is one.
	Err error
	// RenewalErr says why the origin does not deliver at present; nil while it
	// does. The last SVID can still be usable.
	RenewalErr error
	// Failures counts the attempts to get an SVID that failed since the start.
	Failures uint64
	// Overdue is true from 7/10 of the life of an SVID that nobody replaced:
	// design section 9 says 2/3, when some issuers renew and are not late.
	Overdue bool
	// Offered lists the IDs that the origin offered last.
	Offered []spiffeid.ID
}

// Problem says in words why our identity does not serve, "" while it does. It
// already does not when the SVID is [Status.Overdue]: there is time to act while
// connections still work.
func (s Status) Problem() string {
	switch {
	case s.Err != nil:
		return s.Err.Error()
	case !s.Overdue:
		return ""
	case s.RenewalErr != nil:
		return fmt.Sprintf("our SVID %s ends at %s and nobody has renewed it: %v", s.ID, stamp(s.NotAfter), s.RenewalErr)
	}
	return fmt.Sprintf("our SVID %s ends at %s and nobody has renewed it", s.ID, stamp(s.NotAfter))
}

func (s Status) equal(o Status) bool {
	return s.ID == o.ID && s.Serial == o.Serial && s.NotBefore.Equal(o.NotBefore) && s.NotAfter.Equal(o.NotAfter) &&
		s.Rotations == o.Rotations && s.Failures == o.Failures && s.Overdue == o.Overdue &&
		text(s.Err) == text(o.Err) && text(s.RenewalErr) == text(o.RenewalErr) && slices.Equal(s.Offered, o.Offered)
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// origin is where SVIDs come from. watch hands each one it sees to
// [Source.offer], each failure to [Source.fail], and returns when ctx ends.
type origin interface {
	watch(ctx context.Context, s *Source) error
	String() string
}

// Source is our own X.509-SVID and the trust bundle. It implements
// [x509svid.Source], [x509bundle.Source] and [task.Task].
type Source struct {
	origin origin
	id     spiffeid.ID
	log    *slog.Logger
	status *latest.Value[Status]
	ready  chan struct{}

	mu sync.Mutex
	// current is the SVID in use. pending is a newer one that is not valid yet,
	// held back while current still is.
	current, pending *x509svid.SVID
	bundles          x509bundle.Source
	renewalErr       error
	failures         uint64
	rotations        uint64
	offered          []spiffeid.ID
	isReady          bool
	overdueSerial    string // of the SVID whose late rotation was logged
}

var (
	_ x509svid.Source   = (*Source)(nil)
	_ x509bundle.Source = (*Source)(nil)
	_ task.Task         = (*Source)(nil)
)

func newSource(from origin, o Options) *Source {
	s := &Source{
		origin:     from,
		id:         o.ID,
		log:        o.Log.With("component", "identity", "source", from.String()),
		ready:      make(chan struct{}),
		renewalErr: fmt.Errorf("waiting for the first SVID from %s", from),
	}
	s.status = latest.New(Status{Err: s.renewalErr, RenewalErr: s.renewalErr})
	return s
}

// Run keeps the SVID fresh until ctx ends. A failing origin is retried with
// back-off and never makes Run return.
func (s *Source) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return task.Guard(ctx, s.String(), func(ctx context.Context) error { return s.origin.watch(ctx, s) })
	})
	g.Go(func() error { return s.keepTime(ctx) })
	return g.Wait()
}

// Ready is closed at the first usable SVID.
func (s *Source) Ready() <-chan struct{} { return s.ready }

// String names the source and its origin.
func (s *Source) String() string { return "identity from " + s.origin.String() }

// Status tells about our own SVID. It changes at each rotation, failure and
// expiry.
func (s *Source) Status() *latest.Value[Status] { return s.status }

// GetX509SVID returns our own SVID. It fails, and says why, when there is none
// that is valid at this moment.
func (s *Source) GetX509SVID() (*x509svid.SVID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.settle(now)
	if err := s.usable(now); err != nil {
		return nil, err
	}
	return s.current, nil
}

// GetX509BundleForTrustDomain returns the authorities that are trusted for the
// trust domain.
func (s *Source) GetX509BundleForTrustDomain(td spiffeid.TrustDomain) (*x509bundle.Bundle, error) {
	s.mu.Lock()
	bundles := s.bundles
	s.mu.Unlock()
	if bundles == nil {
		return nil, fmt.Errorf("no trust bundle yet from %s", s.origin)
	}
	return bundles.GetX509BundleForTrustDomain(td)
}

// offer takes what an origin delivered: every SVID that it offers us, and the
// bundles to trust from now on.
func (s *Source) offer(svids []*x509svid.SVID, bundles x509bundle.Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bundles = bundles
	s.offered = s.offered[:0:0]
	for _, svid := range svids {
		if !slices.Contains(s.offered, svid.ID) {
			s.offered = append(s.offered, svid.ID)
		}
	}
	svid, err := s.pick(svids)
	if err != nil {
		s.failLocked(err)
		return
	}
	now := time.Now()
	switch err := validAt(svid, now); {
	case err == nil:
		s.renewalErr = nil
		s.adopt(svid)
	case s.usable(now) != nil:
		// Nothing better is at hand, so the status shows this one and why it
		// does not serve. If it is not valid yet, its time will come.
		s.adopt(svid)
		if !errors.Is(err, ErrNotYetValid) {
			s.failLocked(err)
			return
		}
		s.renewalErr = nil
	case errors.Is(err, ErrNotYetValid):
		s.pending = svid
		s.renewalErr = nil
	default:
		s.failLocked(err)
		return
	}
	s.publish(now)
}

// pick chooses our own SVID among those offered. There is no guessing: several
// IDs and no wish is an error, since the peers expect one exact ID.
func (s *Source) pick(svids []*x509svid.SVID) (*x509svid.SVID, error) {
	if s.id.IsZero() {
		if len(s.offered) == 1 {
			return svids[0], nil
		}
		return nil, fmt.Errorf("%s offers %d SPIFFE IDs (%s): choose ours with --spiffe-id", s.origin, len(s.offered), join(s.offered))
	}
	for _, svid := range svids {
		if svid.ID == s.id {
			return svid, nil
		}
	}
	return nil, fmt.Errorf("%s does not offer %s, only %s", s.origin, s.id, join(s.offered))
}

func join(ids []spiffeid.ID) string {
	if len(ids) == 0 {
		return "nothing"
	}
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = id.String()
	}
	return strings.Join(names, ", ")
}

// fail takes the reason why an origin could not deliver.
func (s *Source) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failLocked(err)
}

func (s *Source) failLocked(err error) {
	level := slog.LevelDebug // the same again
	if text(s.renewalErr) != err.Error() {
		level = slog.LevelWarn
	}
	s.renewalErr = err
	s.failures++
	s.log.Log(context.Background(), level, "no new SVID", "error", err, "failures", s.failures)
	s.publish(time.Now())
}

func (s *Source) adopt(svid *x509svid.SVID) {
	s.pending = nil
	old := s.current
	s.current = svid
	leaf := svid.Certificates[0]
	switch {
	case old == nil:
		s.log.Info("SVID received", "spiffe_id", svid.ID, "serial", serial(leaf), "not_after", leaf.NotAfter)
	case !old.Certificates[0].Equal(leaf):
		s.rotations++
		s.log.Info("SVID rotated", "spiffe_id", svid.ID, "serial", serial(leaf), "not_after", leaf.NotAfter, "rotations", s.rotations)
	}
}

// settle puts the pending SVID in use once its time has come.
func (s *Source) settle(now time.Time) {
	if s.pending != nil && validAt(s.pending, now) == nil {
		s.adopt(s.pending)
	}
}

// usable says why there is no usable SVID.
func (s *Source) usable(now time.Time) error {
	if s.current == nil {
		return s.renewalErr
	}
	err := validAt(s.current, now)
	if err != nil && s.renewalErr != nil && s.renewalErr.Error() != err.Error() {
		return fmt.Errorf("%w; no new one: %w", err, s.renewalErr)
	}
	return err
}

// ErrExpired and ErrNotYetValid are wrapped by the errors about a certificate
// outside of its validity.
var (
	ErrExpired     = errors.New("expired")
	ErrNotYetValid = errors.New("not yet valid")
)

func validAt(svid *x509svid.SVID, now time.Time) error {
	leaf := svid.Certificates[0]
	return validity("our SVID "+svid.ID.String(), leaf, now)
}

// validity compares with the wall clock, and shows it: a wrong clock is as
// likely a cause as a wrong certificate.
func validity(what string, c *x509.Certificate, now time.Time) error {
	switch {
	case now.After(c.NotAfter):
		return fmt.Errorf("%s %w at %s (the clock here says %s)", what, ErrExpired, stamp(c.NotAfter), stamp(now))
	case now.Before(c.NotBefore):
		return fmt.Errorf("%s is %w: it starts at %s (the clock here says %s)", what, ErrNotYetValid, stamp(c.NotBefore), stamp(now))
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func serial(c *x509.Certificate) string { return c.SerialNumber.Text(16) }

// overdueAt is when a certificate ought to have been replaced: 2/3 of its life,
// and 1/30 more, because some issuers (cert-manager's driver among them) renew
// at 2/3 sharp and are not late.
func overdueAt(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 30 * 21)
}

// publish brings the status up to date and returns how long it stays so.
func (s *Source) publish(now time.Time) time.Duration {
	s.settle(now)
	st := Status{
		Rotations:  s.rotations,
		Err:        s.usable(now),
		RenewalErr: s.renewalErr,
		Failures:   s.failures,
		Offered:    s.offered,
	}
	wait := wallCheck
	until := func(t time.Time) {
		if d := t.Sub(now); d >= 0 {
			// One nanosecond more, since NotAfter itself is still valid.
			wait = min(wait, d+1)
		}
	}
	if s.pending != nil {
		until(s.pending.Certificates[0].NotBefore)
	}
	if s.current != nil {
		leaf := s.current.Certificates[0]
		st.ID, st.Serial, st.NotBefore, st.NotAfter = s.current.ID, serial(leaf), leaf.NotBefore, leaf.NotAfter
		st.Overdue = s.pending == nil && now.After(overdueAt(leaf))
		until(leaf.NotBefore)
		until(overdueAt(leaf))
		until(leaf.NotAfter)
	}
	if st.Overdue && s.overdueSerial != st.Serial {
		s.overdueSerial = st.Serial
		s.log.Warn("SVID was not rotated in time", "spiffe_id", st.ID, "not_after", st.NotAfter, "error", s.renewalErr)
	}
	previous := s.status.Load()
	if st.equal(previous) {
		return wait
	}
	if st.Err != nil && previous.Err == nil {
		s.log.Error("no usable SVID", "error", st.Err)
	}
	s.status.Set(st)
	if st.Err == nil && !s.isReady {
		s.isReady = true
		close(s.ready)
	}
	return wait
}

// keepTime brings the status up to date when time alone changes it.
func (s *Source) keepTime(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		_, changed := s.status.Get()
		s.mu.Lock()
		wait := s.publish(time.Now())
		s.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-timer.C:
		}
	}
}
