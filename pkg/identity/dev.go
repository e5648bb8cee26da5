package identity

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// minDevTTL is the minimum for certificate times of whole seconds: half of it is the rotation
// interval.
const minDevTTL = 2 * time.Second

// NewDev returns a source that signs its own SVID for id with the development authority in dir. Run
// creates a missing authority; the processes of one machine share it. A dir that other users can
// access or whose authority is corrupt is rejected. The SVID lives for Options.DevTTL and is
// replaced at half of that. A running source adopts a new authority that another process put into
// dir.
func NewDev(dir string, id spiffeid.ID, o Options) (*Source, error) {
	o = o.withDefaults()
	if id.Path() == "" {
		return nil, fmt.Errorf("SPIFFE ID %q for the development authority has no path; use one such as "+
			"spiffe://example.org/lb", id)
	}
	if o.DevTTL < minDevTTL {
		return nil, fmt.Errorf("--dev-ttl=%s: the minimum is %s", o.DevTTL, minDevTTL)
	}
	if _, err := LoadDevAuthority(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	o.ID = id
	s := newSource(&dev{dir: dir, id: id, ttl: o.DevTTL, poll: o.Poll}, o)
	s.log.Warn("development authority in use: a process that can read its directory can impersonate any SPIFFE ID",
		"dir", dir, "spiffe_id", id)
	return s, nil
}

type dev struct {
	dir       string
	id        spiffeid.ID
	ttl, poll time.Duration
	authority *DevAuthority // nil until sign has opened it
}

func (d *dev) String() string { return "the development authority in " + d.dir }

func (d *dev) watch(ctx context.Context, s *Source) error {
	retry := newRetry()
	for {
		svid, err := d.sign(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.fail(fmt.Errorf("%s: %w", d, err))
			if err := retry.Wait(ctx); err != nil {
				return err
			}
			continue
		}
		retry.Reset()
		s.offer([]*x509svid.SVID{svid}, d.authority.Bundle(d.id.TrustDomain()))
		due := time.Now().Add(time.Until(svid.Certificates[0].NotAfter) / 2)
		if err := d.waitRotation(ctx, s, due); err != nil {
			return err
		}
	}
}

// sign signs the next SVID and opens the authority first if necessary.
func (d *dev) sign(ctx context.Context) (*x509svid.SVID, error) {
	if d.authority == nil {
		a, err := OpenDevAuthority(ctx, d.dir)
		if err != nil {
			return nil, err
		}
		d.authority = a
	}
	return d.authority.MintFor(d.id, d.ttl)
}

// waitRotation waits until the rotation is due or the directory has another authority. It does not
// create one: if the directory was emptied, running processes continue to trust each other.
func (d *dev) waitRotation(ctx context.Context, s *Source, due time.Time) error {
	for time.Now().Before(due) {
		if err := backoff.Sleep(ctx, min(d.poll, time.Until(due))); err != nil {
			return err
		}
		switch a, err := LoadDevAuthority(d.dir); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			s.fail(fmt.Errorf("%s: %w", d, err))
		case !a.cert.Equal(d.authority.cert):
			s.log.Warn("development authority replaced", "dir", d.dir)
			d.authority = a
			return nil
		}
	}
	return nil
}
