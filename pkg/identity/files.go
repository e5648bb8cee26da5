package identity

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/tick"
)

// The file names of an SVID in a directory, as in cert-manager's SPIFFE CSI driver.
const (
	CertFile   = "tls.crt" // the SVID, then its intermediates
	KeyFile    = "tls.key" // its private key
	BundleFile = "ca.crt"  // the authorities of its trust domain
)

// NewFiles returns a source that reads tls.crt, tls.key and ca.crt (PEM) in dir and follows
// changes: files written in place or renamed, and the symlink swap of the kubelet and of CSI
// drivers. It polls: an SVID is renewed long before its end, and a node may have no inotify
// instances left. While the files are missing or invalid, the last valid SVID stays in use.
func NewFiles(dir string, options Options) (*Source, error) {
	if dir == "" {
		return nil, fmt.Errorf("no directory for the SVID: set the one that contains %s, %s and %s", CertFile, KeyFile,
			BundleFile)
	}
	return newSource(&fileSource{dir: filepath.Clean(dir), poll: pollInterval}, options), nil
}

type fileSource struct {
	dir  string
	poll time.Duration
}

func (source *fileSource) String() string { return "the files in " + source.dir }

func (source *fileSource) watch(ctx context.Context, s *Source) error {
	var last [3][]byte // last valid content
	calls := files.Calls{Path: filepath.Join(source.dir, CertFile)}
	for {
		read := func() ([3][]byte, error) { return readFiles(source.dir) }
		parts, err := files.Do(ctx, &calls, "directory "+source.dir, read)
		changed := !slices.EqualFunc(parts[:], last[:], bytes.Equal)
		var svid *x509svid.SVID
		var bundle *x509bundle.Bundle
		if err == nil && changed {
			svid, bundle, err = parseFiles(parts)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			last = [3][]byte{}
			s.fail(fmt.Errorf("%s: %w", source, err))
		case changed:
			last = parts
			s.offer([]*x509svid.SVID{svid}, bundle)
		}
		if err := backoff.Sleep(ctx, tick.Until(time.Now(), source.poll)); err != nil {
			return err
		}
	}
}

// maxFile bounds a file of an SVID.
const maxFile = 1 << 20

func readFiles(dir string) (parts [3][]byte, err error) {
	// The kubelet and CSI drivers swap the symlink ..data to change all files atomically. Resolving
	// it once avoids a mix of two generations.
	from := dir
	if resolved, err := filepath.EvalSymlinks(filepath.Join(dir, "..data")); err == nil {
		from = resolved
	}
	for i, name := range []string{CertFile, KeyFile, BundleFile} {
		if parts[i], err = files.Read(filepath.Join(from, name), maxFile); err != nil {
			return parts, err
		}
	}
	return parts, nil
}

// parseFiles returns the SVID and the bundle and checks that they match.
func parseFiles(parts [3][]byte) (*x509svid.SVID, *x509bundle.Bundle, error) {
	var der []byte
	// Unlike go-spiffe, it accepts keys in PKCS#1 and SEC 1, which issuers write as well.
	pair, err := tls.X509KeyPair(parts[0], parts[1])
	if err == nil {
		der, err = x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	}
	var svid *x509svid.SVID
	if err == nil {
		svid, err = x509svid.ParseRaw(slices.Concat(pair.Certificate...), der)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s with %s: %w", CertFile, KeyFile, err)
	}
	bundle, err := x509bundle.Parse(svid.ID.TrustDomain(), parts[2])
	if err == nil && bundle.Empty() {
		err = errors.New("contains no PEM certificate")
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", BundleFile, err)
	}
	// Verified at the start of its validity; Source checks the current time.
	if _, _, err := x509svid.Verify(svid.Certificates, bundle, x509svid.WithTime(pair.Leaf.NotBefore)); err != nil {
		return nil, nil, fmt.Errorf("%s is not signed by the authorities in %s: %w", CertFile, BundleFile, err)
	}
	return svid, bundle, nil
}
