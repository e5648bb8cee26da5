package identity

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/files"
)

// The file names of an SVID in a directory, as in cert-manager's SPIFFE CSI driver.
const (
	CertFile   = "tls.crt" // the SVID, then its intermediates
	KeyFile    = "tls.key" // its private key
	BundleFile = "ca.crt"  // the authorities of its trust domain
)

// NewFiles returns a source that reads tls.crt, tls.key and ca.crt (PEM) in dir and follows
// changes: files written in place or renamed, and the symlink swap of the kubelet and of CSI
// drivers. While the files are missing or invalid, the last valid SVID stays in use.
func NewFiles(dir string, o Options) (*Source, error) {
	if dir == "" {
		return nil, fmt.Errorf("no directory for the SVID: set the one that contains %s, %s and %s", CertFile, KeyFile,
			BundleFile)
	}
	o = o.withDefaults()
	return newSource(&fileSource{dir: filepath.Clean(dir), poll: o.Poll}, o), nil
}

const (
	// settleTime merges the events of one change of several files.
	settleTime = 20 * time.Millisecond
	// retryPoll is the poll interval while the files are missing or inconsistent: they may have
	// been read in the middle of a change.
	retryPoll = 500 * time.Millisecond
)

type fileSource struct {
	dir      string
	poll     time.Duration
	pollOnly bool
}

func (f *fileSource) String() string { return "the files in " + f.dir }

func (f *fileSource) watch(ctx context.Context, s *Source) error {
	n := f.notifications(s)
	defer n.close()
	var last []byte // last valid content
	var calls files.Calls
	for {
		wait := f.poll
		parts, err := files.Do(ctx, &calls, "directory "+f.dir, func() ([3][]byte, error) {
			// Watch before reading, so that no change is missed in between.
			n.watch(f.dir)
			return readFiles(f.dir)
		})
		var svid *x509svid.SVID
		var bundle *x509bundle.Bundle
		if err == nil {
			svid, bundle, err = parseFiles(parts)
		}
		raw := bytes.Join(parts[:], []byte{0})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			last = nil
			wait = min(wait, retryPoll)
			s.fail(fmt.Errorf("%s: %w", f, err))
		case !bytes.Equal(raw, last):
			last = raw
			s.offer([]*x509svid.SVID{svid}, bundle)
		}
		if err := n.wait(ctx, wait); err != nil {
			return err
		}
	}
}

// notifications are inotify events of a directory. Events may be missed; the poll covers them.
type notifications struct {
	watcher *fsnotify.Watcher // nil: not available
	events  <-chan fsnotify.Event
	errors  <-chan error
}

func (f *fileSource) notifications(s *Source) *notifications {
	if f.pollOnly {
		return &notifications{}
	}
	w, err := fsnotify.NewWatcher()
	if err != nil {
		// inotify instances can run out on a busy node.
		s.log.Warn("inotify unavailable, polling files", "error", err)
		return &notifications{}
	}
	return &notifications{watcher: w, events: w.Events, errors: w.Errors}
}

// watch adds dir again each time, since it may have been replaced. While dir is missing, only the
// poll detects it.
func (n *notifications) watch(dir string) {
	if n.watcher != nil {
		_ = n.watcher.Add(dir)
	}
}

func (n *notifications) close() {
	if n.watcher != nil {
		_ = n.watcher.Close()
	}
}

// wait returns after a change, after d, or with the error of ctx.
func (n *notifications) wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	changed := false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-n.events:
		case <-n.errors: // such as an overflow of the queue: treated as a change
		}
		// Only the first event sets the timer, so that a directory that changes all the time cannot
		// delay the reading.
		if !changed {
			changed = true
			timer.Reset(settleTime)
		}
	}
}

// maxFile bounds a file of an SVID.
const maxFile = 1 << 20

// readFiles reads the certificate, the key and the bundle in dir.
func readFiles(dir string) (parts [3][]byte, err error) {
	// The kubelet and CSI drivers swap the symlink ..data to change all files at once; resolving it
	// once avoids a mix of two generations.
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
	certs, err := certificates(parts[0])
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", CertFile, err)
	}
	key, err := privateKey(parts[1])
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", KeyFile, err)
	}
	authorities, err := certificates(parts[2])
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", BundleFile, err)
	}
	var chain []byte
	for _, c := range certs {
		chain = append(chain, c.Raw...)
	}
	svid, err := x509svid.ParseRaw(chain, key)
	if err != nil {
		return nil, nil, fmt.Errorf("%s with %s: %w", CertFile, KeyFile, err)
	}
	bundle := x509bundle.FromX509Authorities(svid.ID.TrustDomain(), authorities)
	// Verified at the start of its validity; Source checks the current time.
	if _, _, err := x509svid.Verify(svid.Certificates, bundle, x509svid.WithTime(certs[0].NotBefore)); err != nil {
		return nil, nil, fmt.Errorf("%s is not signed by the authorities in %s: %w", CertFile, BundleFile, err)
	}
	return svid, bundle, nil
}

func certificates(b []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		block, b = pem.Decode(b)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, errors.New("contains no PEM certificate")
	}
	return certs, nil
}

// privateKey returns the first private key as PKCS#8. Issuers write PKCS#1 and SEC 1 as well.
func privateKey(b []byte) ([]byte, error) {
	for {
		var block *pem.Block
		block, b = pem.Decode(b)
		if block == nil {
			return nil, errors.New("contains no PEM private key")
		}
		var key any
		var err error
		switch block.Type {
		case "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		case "RSA PRIVATE KEY":
			key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
		default:
			continue
		}
		if err != nil {
			return nil, err
		}
		return x509.MarshalPKCS8PrivateKey(key)
	}
}
