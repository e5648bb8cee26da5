package identity

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
)

// minDevTTL is what whole seconds allow: at half of it the rotation is due.
const minDevTTL = 2 * time.Second

// NewDev returns a source that signs its own SVID for id with the development
// authority in dir, which is made when missing, once the source runs, and shared
// with the other processes on this machine. A dir that others could use, or whose
// authority is broken, is refused. The SVID lives for Options.DevTTL and is
// replaced at half of that. A running source follows when another process has put
// a new authority into dir.
func NewDev(dir string, id spiffeid.ID, o Options) (*Source, error) {
	o = o.withDefaults()
	if id.IsZero() {
		id = o.ID
	}
	if id.Path() == "" {
		return nil, fmt.Errorf("SPIFFE ID %q for the development authority names no workload: it needs a path, such as spiffe://example.org/lb", id)
	}
	if o.DevTTL < minDevTTL {
		return nil, fmt.Errorf("--dev-ttl=%s: the development authority gives %s or more", o.DevTTL, minDevTTL)
	}
	if err := checkAuthority(dir); err != nil {
		return nil, err
	}
	o.ID = id
	s := newSource(&dev{dir: dir, id: id, ttl: o.DevTTL, poll: o.Poll}, o)
	s.log.Warn("the development authority is for one machine only: whoever can read its directory can be anyone",
		"dir", dir, "spiffe_id", id)
	return s, nil
}

type dev struct {
	dir       string
	id        spiffeid.ID
	ttl, poll time.Duration
	authority *DevAuthority // nil until watch has opened it
}

func (d *dev) String() string { return "the development authority in " + d.dir }

func (d *dev) watch(ctx context.Context, s *Source) error {
	retry := &backoff{}
	for {
		svid, err := d.sign(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.fail(fmt.Errorf("%s: %w", d, err))
			if err := sleep(ctx, retry.Next()); err != nil {
				return err
			}
			continue
		}
		retry.Reset()
		s.offer([]*x509svid.SVID{svid}, d.authority.Bundle(d.id.TrustDomain()))
		if err := d.hold(ctx, s, time.Until(svid.Certificates[0].NotAfter)/2); err != nil {
			return err
		}
	}
}

// sign signs the next SVID, with the authority that it opens when that is the
// first.
func (d *dev) sign(ctx context.Context) (*x509svid.SVID, error) {
	if d.authority == nil {
		a, err := openAuthority(ctx, d.dir)
		if err != nil {
			return nil, err
		}
		d.authority = a
	}
	return d.authority.MintFor(d.id, d.ttl)
}

// hold waits until the rotation is due or another authority lies in the
// directory. It never makes one: when somebody tidied the directory, those who
// run keep on trusting each other.
func (d *dev) hold(ctx context.Context, s *Source, due time.Duration) error {
	timer := time.NewTimer(due)
	defer timer.Stop()
	tick := time.NewTicker(d.poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-tick.C:
		}
		a, err := loadAuthority(d.dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			s.fail(fmt.Errorf("%s: %w", d, err))
		case !a.cert.Equal(d.authority.cert):
			s.log.Warn("another development authority was put in place", "dir", d.dir)
			d.authority = a
			return nil
		}
	}
}
