package identity

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/logs"
)

// cacheDelay is how long a start waits for the Workload API before it uses the cached SVID: the
// SPIRE agent answers a registered process within some milliseconds.
const cacheDelay = time.Second

// cache stores the SVID in use, its key and the bundles in a file. A start uses them while the
// Workload API does not answer or refuses (docs/adr/0038-cached-svid.md).
type cache struct {
	path    string
	id      spiffeid.ID // of this process; zero accepts any
	calls   files.Calls
	failure string // of the last write
}

// cachedSVID is the content of the file, in DER.
type cachedSVID struct {
	Chain []byte `json:"chain"` // the SVID, then its intermediates
	Key   []byte `json:"key"`   // PKCS#8
	// Bundles are the authorities of each trust domain.
	Bundles map[string][]byte `json:"bundles"`
}

// replace offers the cached SVID at the first failure of the Workload API, or after cacheDelay.
// It does not read the file if the API issues an SVID first.
func (cache *cache) replace(ctx context.Context, source *Source) {
	timer := time.After(cacheDelay)
	for late := false; !late; {
		state, changed := source.status.Get()
		// The API refuses or fails: a longer wait would only delay the start.
		if state.Failures > 0 {
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-source.usable:
			return
		case <-changed:
		case <-timer:
			late = true
		}
	}
	type content struct {
		svid    *x509svid.SVID
		bundles *x509bundle.Set
	}
	x, err := files.Do(ctx, &cache.calls, "identity cache "+cache.path, func() (x content, err error) {
		x.svid, x.bundles, err = cache.read(time.Now())
		return x, err
	})
	// A missing file is normal at the first start.
	if ctx.Err() == nil && (err != nil || x.svid != nil) {
		source.offerCached(x.svid, x.bundles, err)
	}
}

// read returns the SVID and the bundles in the file, or nil without a file.
func (cache *cache) read(now time.Time) (*x509svid.SVID, *x509bundle.Set, error) {
	var content cachedSVID
	found, err := durable.ReadPrivate(cache.path, &content)
	if err != nil || !found {
		return nil, nil, err
	}
	bundles := x509bundle.NewSet()
	svid, err := x509svid.ParseRaw(content.Chain, content.Key)
	for name, der := range content.Bundles {
		// Reject the whole file: without one bundle all peers of its trust domain would be refused.
		if err != nil {
			break
		}
		var domain spiffeid.TrustDomain
		var bundle *x509bundle.Bundle
		if domain, err = spiffeid.TrustDomainFromString(name); err == nil {
			bundle, err = x509bundle.ParseRaw(domain, der)
		}
		if err == nil {
			bundles.Add(bundle)
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s %w: %w", cache.path, durable.ErrCorrupt, err)
	}
	// The file may be older than this configuration: check ID, validity and signature as of any SVID.
	if !cache.id.IsZero() && svid.ID != cache.id {
		return nil, nil, fmt.Errorf("%s has an SVID of %s, not of %s", cache.path, svid.ID, cache.id)
	}
	if err := validAt(svid, now); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", cache.path, err)
	}
	if _, _, err := x509svid.Verify(svid.Certificates, bundles, x509svid.WithTime(now)); err != nil {
		return nil, nil, fmt.Errorf("%s: the SVID is not signed by the cached authorities: %w", cache.path, err)
	}
	return svid, bundles, nil
}

// store writes the SVID and the bundles to the file. A failure is logged; the next update of the
// Workload API writes the file again.
func (cache *cache) store(ctx context.Context, svid *x509svid.SVID, bundles *x509bundle.Set, log *slog.Logger) {
	content := cachedSVID{Bundles: map[string][]byte{}}
	for _, bundle := range bundles.Bundles() {
		var der []byte
		for _, authority := range bundle.X509Authorities() {
			der = append(der, authority.Raw...)
		}
		content.Bundles[bundle.TrustDomain().Name()] = der
	}
	var err error
	if content.Chain, content.Key, err = svid.MarshalRaw(); err == nil {
		_, err = files.Do(ctx, &cache.calls, "identity cache "+cache.path, func() (struct{}, error) {
			return struct{}{}, durable.Write(cache.path, &content)
		})
	}
	if ctx.Err() != nil {
		return
	}
	if failure := logs.Text(err); failure != cache.failure {
		cache.failure = failure
		if err != nil {
			log.Warn("failed to write the identity cache; a restart needs the Workload API", "error", err)
		} else {
			log.Info("identity cache written again", "file", cache.path)
		}
	}
}
