package identity

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
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
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// clockCheckInterval bounds the delay until the Status reflects a jump of the wall clock.
	clockCheckInterval = 30 * time.Second
	// pollInterval is how often the files of an origin are read.
	pollInterval = time.Second
)

// Options are shared by all origins. The zero value is usable.
type Options struct {
	// ID is the SPIFFE ID of this process. It selects one of several offered SVIDs; an SVID with
	// another ID is rejected. Zero: the only offered ID.
	ID spiffeid.ID
	// Cache is the file in which a source of the Workload API keeps the SVID in use, its key and the
	// bundles for its next start; "" keeps none.
	Cache string
	// DevTTL is the lifetime of an SVID of the development authority, at least 2 s (certificate
	// times are whole seconds). Zero: 1 h.
	DevTTL time.Duration
	// Log receives events of the SVID; nil discards them.
	Log *slog.Logger
}

// Status is the state of the SVID.
type Status struct {
	// ID, Serial (hexadecimal), NotBefore and NotAfter describe the SVID in use, or the last SVID
	// after its expiry; they are zero before the first.
	ID                  spiffeid.ID
	Serial              string
	NotBefore, NotAfter time.Time
	// Rotations counts the replacements of the SVID in use.
	Rotations uint64
	// Err is the reason why the source has no usable SVID; nil if it has one.
	Err error
	// RenewalErr is the current error of the origin. The last SVID can still be usable.
	RenewalErr error
	// Failures counts the failed attempts to get an SVID.
	Failures uint64
	// Cached is set while the SVID in use is from [Options.Cache].
	Cached bool
	// Overdue is set from 7/10 of the lifetime of an SVID that was not replaced; see overdueAt.
	Overdue bool
}

// Problem returns why the identity is unhealthy; "" while it is healthy. A [Status.Overdue] SVID is
// unhealthy: an operator has time to act while connections still work.
func (status Status) Problem() string {
	switch {
	case status.Err != nil:
		return status.Err.Error()
	case !status.Overdue:
		return ""
	}
	problem := fmt.Sprintf("the SVID %s expires at %s and was not renewed", status.ID, formatTime(status.NotAfter))
	if status.RenewalErr != nil {
		problem += ": " + status.RenewalErr.Error()
	}
	return problem
}

// origin supplies SVIDs. watch passes each one to [Source.offer], each failure to [Source.fail],
// and returns when ctx ends.
type origin interface {
	watch(ctx context.Context, s *Source) error
	String() string
}

// Source holds the X.509-SVID of this process and the trust bundle. It implements
// [x509svid.Source], [x509bundle.Source] and [task.Task].
type Source struct {
	origin origin
	id     spiffeid.ID
	log    *slog.Logger
	status *latest.Value[Status]
	usable chan struct{}
	ready  func() // closes usable, once

	mu sync.Mutex
	// current is the SVID in use. pending is a newer one that is not valid yet; it is held back
	// while current is valid.
	current, pending *x509svid.SVID
	bundles          x509bundle.Source
	answered         bool   // the origin has offered SVIDs
	cacheErr         error  // why the cached SVID was not used
	next             Status // the next status; publish completes it
	overdueSerial    string // of the SVID whose overdue rotation was logged
}

var (
	_ x509svid.Source   = (*Source)(nil)
	_ x509bundle.Source = (*Source)(nil)
	_ task.Task         = (*Source)(nil)
)

func newSource(from origin, options Options) *Source {
	options.Log = cmp.Or(options.Log, slog.New(slog.DiscardHandler))
	waiting := fmt.Errorf("waiting for the first SVID from %s", from)
	initial := Status{Err: waiting, RenewalErr: waiting}
	usable := make(chan struct{})
	return &Source{
		origin: from, id: options.ID, log: options.Log.With("component", "identity", "source", from.String()),
		next: initial, status: latest.New(initial), usable: usable, ready: sync.OnceFunc(func() { close(usable) }),
	}
}

// Run keeps the SVID fresh until ctx ends. A failing origin is retried with back-off; Run does not
// return its errors.
func (source *Source) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return task.Guard(ctx, source.String(), func(ctx context.Context) error { return source.origin.watch(ctx, source) })
	})
	group.Go(func() error { return source.runTimer(ctx) })
	return group.Wait()
}

// Ready is closed at the first usable SVID.
func (source *Source) Ready() <-chan struct{} { return source.usable }

// String names the source and its origin.
func (source *Source) String() string { return "identity from " + source.origin.String() }

// Status returns the state of the SVID. It changes at each rotation, failure and expiry.
func (source *Source) Status() *latest.Value[Status] { return source.status }

// GetX509SVID returns the SVID, or an error when none is valid now.
func (source *Source) GetX509SVID() (*x509svid.SVID, error) {
	source.mu.Lock()
	defer source.mu.Unlock()
	now := time.Now()
	source.activatePending(now)
	if err := source.checkUsable(now); err != nil {
		return nil, err
	}
	return source.current, nil
}

// GetX509BundleForTrustDomain returns the authorities that are trusted for the trust domain.
func (source *Source) GetX509BundleForTrustDomain(domain spiffeid.TrustDomain) (*x509bundle.Bundle, error) {
	source.mu.Lock()
	bundles := source.bundles
	source.mu.Unlock()
	if bundles == nil {
		return nil, fmt.Errorf("no trust bundle yet from %s", source.origin)
	}
	return bundles.GetX509BundleForTrustDomain(domain)
}

// offer applies an update of the origin: the offered SVIDs and the bundles to trust. It returns the
// SVID of this process if it is valid, else nil.
func (source *Source) offer(svids []*x509svid.SVID, bundles x509bundle.Source) *x509svid.SVID {
	source.mu.Lock()
	defer source.mu.Unlock()
	source.bundles, source.answered = bundles, true
	svid, err := source.pick(svids)
	if err != nil {
		source.failLocked(err)
		return nil
	}
	now := time.Now()
	err = validAt(svid, now)
	early := errors.Is(err, ErrNotYetValid)
	switch {
	case err == nil, source.checkUsable(now) != nil:
		// An invalid SVID is adopted if no valid one is in use: the status shows it and its error.
		source.adopt(svid)
	case early:
		// The local clock may be late: use the current SVID until the new one is valid.
		source.pending = svid
	}
	if err != nil && !early {
		source.failLocked(err)
		return nil
	}
	source.next.RenewalErr = nil
	source.publish(now)
	if err != nil {
		return nil
	}
	return svid
}

// offerCached applies the SVID of an earlier run, unless the origin has offered any. A non-nil
// failure is why the cached SVID cannot be used.
func (source *Source) offerCached(svid *x509svid.SVID, bundles x509bundle.Source, failure error) {
	source.mu.Lock()
	defer source.mu.Unlock()
	// An SVID of the origin is newer than any cached one.
	if source.answered {
		return
	}
	if source.cacheErr = failure; failure != nil {
		source.log.Warn("cached SVID refused", "error", failure)
	} else {
		source.current, source.bundles, source.next.Cached = svid, bundles, true
		source.log.Warn("cached SVID in use", "spiffe_id", svid.ID, "serial", serial(svid.Certificates[0]),
			"not_after", svid.Certificates[0].NotAfter, "error", source.next.RenewalErr)
	}
	source.publish(time.Now())
}

// pick selects the SVID of this process. Several IDs without Options.ID are an error, since the
// peers expect one exact ID.
func (source *Source) pick(svids []*x509svid.SVID) (*x509svid.SVID, error) {
	var offered []spiffeid.ID
	for _, svid := range svids {
		if svid.ID == source.id {
			return svid, nil
		}
		if !slices.Contains(offered, svid.ID) {
			offered = append(offered, svid.ID)
		}
	}
	switch {
	case !source.id.IsZero():
		return nil, fmt.Errorf("%s does not offer %s, only %s", source.origin, source.id, join(offered))
	case len(offered) != 1:
		return nil, fmt.Errorf("%s offers %d SPIFFE IDs (%s): select one with --spiffe-id", source.origin, len(offered),
			join(offered))
	}
	return svids[0], nil
}

func join(ids []spiffeid.ID) string { return cmp.Or(strings.Join(vip.Texts(ids), ", "), "nothing") }

func (source *Source) fail(err error) {
	source.mu.Lock()
	defer source.mu.Unlock()
	source.failLocked(err)
}

func (source *Source) failLocked(err error) {
	level := slog.LevelDebug // repeated
	if source.next.RenewalErr == nil || source.next.RenewalErr.Error() != err.Error() {
		level = slog.LevelWarn
	}
	source.next.RenewalErr = err
	source.next.Failures++
	source.log.Log(context.Background(), level, "no new SVID", "error", err, "failures", source.next.Failures)
	source.publish(time.Now())
}

func (source *Source) adopt(svid *x509svid.SVID) {
	source.pending, source.next.Cached = nil, false
	old := source.current
	source.current = svid
	leaf := svid.Certificates[0]
	switch {
	case old == nil:
		source.log.Info("SVID received", "spiffe_id", svid.ID, "serial", serial(leaf), "not_after", leaf.NotAfter)
	case !old.Certificates[0].Equal(leaf):
		source.next.Rotations++
		source.log.Info("SVID rotated", "spiffe_id", svid.ID, "serial", serial(leaf), "not_after", leaf.NotAfter,
			"rotations", source.next.Rotations)
	}
}

// activatePending puts the pending SVID in use once it is valid.
func (source *Source) activatePending(now time.Time) {
	if source.pending != nil && validAt(source.pending, now) == nil {
		source.adopt(source.pending)
	}
}

// checkUsable returns the reason why the source has no usable SVID, or nil if it has one.
func (source *Source) checkUsable(now time.Time) error {
	failure := source.next.RenewalErr
	switch {
	case source.current == nil && source.cacheErr != nil:
		return fmt.Errorf("%w; the cached SVID is refused: %w", failure, source.cacheErr)
	case source.current == nil && failure == nil:
		return errors.New("processes with peer credentials have no SVID")
	case source.current == nil:
		return failure
	}
	err := validAt(source.current, now)
	if err != nil && failure != nil && failure.Error() != err.Error() {
		return fmt.Errorf("%w; no new one: %w", err, failure)
	}
	return err
}

// ErrExpired and ErrNotYetValid are wrapped by errors about the validity of a certificate.
var (
	ErrExpired     = errors.New("expired")
	ErrNotYetValid = errors.New("not yet valid")
)

func validAt(svid *x509svid.SVID, now time.Time) error {
	return validity("the SVID "+svid.ID.String(), svid.Certificates[0], now)
}

// validity compares with the wall clock and reports both times, since either may be wrong.
func validity(what string, certificate *x509.Certificate, now time.Time) error {
	switch {
	case now.After(certificate.NotAfter):
		return fmt.Errorf("%s %w at %s (local clock: %s)", what, ErrExpired, formatTime(certificate.NotAfter),
			formatTime(now))
	case now.Before(certificate.NotBefore):
		return fmt.Errorf("%s is %w: it starts at %s (local clock: %s)", what, ErrNotYetValid,
			formatTime(certificate.NotBefore),
			formatTime(now))
	}
	return nil
}

func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func serial(certificate *x509.Certificate) string { return certificate.SerialNumber.Text(16) }

// overdueAt returns when the rotation of a certificate is overdue: 2/3 of its lifetime and 1/30
// more, because some issuers (such as cert-manager's driver) renew exactly at 2/3.
func overdueAt(certificate *x509.Certificate) time.Time {
	return certificate.NotBefore.Add(certificate.NotAfter.Sub(certificate.NotBefore) / 30 * 21)
}

// publish updates the status and returns the delay until the next change that only time causes.
func (source *Source) publish(now time.Time) time.Duration {
	if source.origin == (peerCredentials{}) {
		return clockCheckInterval // nothing expires
	}
	source.activatePending(now)
	status := &source.next
	status.Err = source.checkUsable(now)
	// Timers use the monotonic clock, validity the wall clock: look again at least once per interval,
	// in case the wall clock was set.
	wait := clockCheckInterval
	recheckAt := func(t time.Time) {
		if duration := t.Sub(now); duration >= 0 {
			// One nanosecond more, since NotAfter itself is still valid.
			wait = min(wait, duration+1)
		}
	}
	if source.pending != nil {
		recheckAt(source.pending.Certificates[0].NotBefore)
	}
	if source.current != nil {
		leaf := source.current.Certificates[0]
		status.ID, status.Serial, status.NotBefore, status.NotAfter = source.current.ID, serial(leaf), leaf.NotBefore,
			leaf.NotAfter
		status.Overdue = source.pending == nil && now.After(overdueAt(leaf))
		recheckAt(leaf.NotBefore)
		recheckAt(overdueAt(leaf))
		recheckAt(leaf.NotAfter)
	}
	// Once per SVID: publish runs at each change and at each timer.
	if status.Overdue && source.overdueSerial != status.Serial {
		source.overdueSerial = status.Serial
		source.log.Warn("SVID rotation overdue", "spiffe_id", status.ID, "not_after", status.NotAfter, "error",
			status.RenewalErr)
	}
	// Readers wake up only for a difference.
	previous := source.status.Load()
	if reflect.DeepEqual(*status, previous) {
		return wait
	}
	if status.Err != nil && previous.Err == nil {
		source.log.Error("no usable SVID", "error", status.Err)
	}
	// First, so that a status without error is never ahead of Ready.
	if status.Err == nil {
		source.ready()
	}
	source.status.Set(*status)
	return wait
}

// runTimer updates the status when it changes by time alone.
func (source *Source) runTimer(ctx context.Context) error {
	for {
		_, changed := source.status.Get()
		source.mu.Lock()
		wait := source.publish(time.Now())
		source.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-time.After(wait):
		}
	}
}
