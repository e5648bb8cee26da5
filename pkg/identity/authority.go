package identity

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/tick"
)

const (
	authorityCert = "ca.crt"
	authorityKey  = "ca.key"
	authorityLock = "ca.lock"
	// svidLock serializes processes that write an SVID to one directory.
	svidLock = "tls.lock"
	// authorityTTL exceeds the lifetime of a development machine.
	authorityTTL = 10 * 365 * 24 * time.Hour
	organization = "vipgate development"
)

// DevAuthority signs X.509-SVIDs of any trust domain. It is for the processes of one machine and
// for tests: a process that can read its key can impersonate any ID.
type DevAuthority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// NewDevAuthority returns an authority in memory.
func NewDevAuthority() (*DevAuthority, error) {
	now := time.Now()
	cert, key, err := (*DevAuthority)(nil).sign(&x509.Certificate{
		Subject: pkix.Name{
			Organization: []string{organization},
			CommonName:   "development authority " + rand.Text(), // distinguishes two in one bundle
		},
		NotBefore: now.Add(-time.Hour),
		NotAfter:  now.Add(authorityTTL),
		KeyUsage:  x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		IsCA:      true,
	})
	if err != nil {
		return nil, fmt.Errorf("failed to create a development authority: %w", err)
	}
	return &DevAuthority{cert: cert, key: key}, nil
}

// sign returns a certificate for a new key, self-signed if a is nil.
func (authority *DevAuthority) sign(template *x509.Certificate) (*x509.Certificate, crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if authority == nil {
		authority = &DevAuthority{cert: template, key: key}
	}
	template.BasicConstraintsValid = true
	der, err := x509.CreateCertificate(rand.Reader, template, authority.cert, key.Public(), authority.key)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return cert, key, err
}

// OpenDevAuthority returns the authority in dir and creates it when missing: dir with mode 0700,
// ca.crt and ca.key with 0600. Concurrent processes agree on one. A directory or key that other
// users could have read or written is rejected.
func OpenDevAuthority(ctx context.Context, dir string) (*DevAuthority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory of the development authority: %w", err)
	}
	lock, err := waitLock(ctx, filepath.Join(dir, authorityLock))
	if err != nil {
		return nil, fmt.Errorf("development authority in %s: %w", dir, err)
	}
	defer lock.Release()
	authority, err := LoadDevAuthority(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return authority, err
	}
	if authority, err = NewDevAuthority(); err != nil {
		return nil, err
	}
	cert, key, err := (&x509svid.SVID{
		Certificates: []*x509.Certificate{authority.cert},
		PrivateKey:   authority.key,
	}).Marshal()
	if err == nil {
		err = durable.Replace(filepath.Join(dir, authorityKey), key, 0o600)
	}
	// Write the certificate last: without it no process has used the key.
	if err == nil {
		err = durable.Replace(filepath.Join(dir, authorityCert), cert, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("development authority: %w", err)
	}
	return authority, nil
}

// LoadDevAuthority returns the authority in dir and does not create one, since no running process
// would trust it. The error wraps fs.ErrNotExist when there is none.
func LoadDevAuthority(dir string) (*DevAuthority, error) {
	if dir == "" {
		return nil, errors.New("no directory for the development authority")
	}
	// A user who can write the directory could replace the authority, so check it before the files.
	err := checkPermissions(dir, 0o022)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("directory of the development authority: %w", err)
	}
	keyPath := filepath.Join(dir, authorityKey)
	cert, err := files.Read(filepath.Join(dir, authorityCert), maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no development authority in %s; use the directory of a running process, which creates it: %w",
			dir, err)
	}
	if err == nil {
		if problem := checkPermissions(keyPath, 0o077); problem != nil {
			// Not ErrNotExist: a certificate without its key is a corrupt authority.
			err = fmt.Errorf("key: %s", problem)
		}
	}
	var key []byte
	var pair tls.Certificate
	if err == nil {
		key, err = files.Read(keyPath, maxFile)
	}
	if err == nil {
		pair, err = tls.X509KeyPair(cert, key)
	}
	if err == nil {
		err = validity("its certificate", pair.Leaf, time.Now())
	}
	if err != nil {
		return nil, fmt.Errorf("development authority in %s: %w; restore it, or remove the directory to create a new one",
			dir, err)
	}
	return &DevAuthority{cert: pair.Leaf, key: pair.PrivateKey.(crypto.Signer)}, nil
}

// checkPermissions checks that path is owned by this user or root and that other users have none of
// the permissions in mask.
func checkPermissions(path string, mask fs.FileMode) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&mask != 0 {
		return fmt.Errorf("%s has mode %#o and is accessible to other users; run chmod go-rwx %s", path, info.Mode().Perm(),
			path)
	}
	if stat_t, ok := info.Sys().(*syscall.Stat_t); ok && stat_t.Uid != 0 && int(stat_t.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, not to user %d or root", path, stat_t.Uid, os.Geteuid())
	}
	return nil
}

// Mint signs an SVID for id, with times in whole seconds: notBefore is rounded down, notAfter up.
func (authority *DevAuthority) Mint(id spiffeid.ID, notBefore, notAfter time.Time) (*x509svid.SVID, error) {
	if id.Path() == "" {
		return nil, fmt.Errorf("SPIFFE ID %q has no path", id)
	}
	cert, key, err := authority.sign(&x509.Certificate{
		Subject:     pkix.Name{Organization: []string{organization}}, // the URI alone identifies the workload
		NotBefore:   notBefore.Truncate(time.Second),
		NotAfter:    notAfter.Add(time.Second - 1).Truncate(time.Second),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{id.URL()},
	})
	if err != nil {
		return nil, fmt.Errorf("failed to sign an SVID for %s: %w", id, err)
	}
	return &x509svid.SVID{ID: id, Certificates: []*x509.Certificate{cert}, PrivateKey: key}, nil
}

// MintFor signs an SVID for id that is valid for ttl from now, with a slightly earlier NotBefore.
func (authority *DevAuthority) MintFor(id spiffeid.ID, ttl time.Duration) (*x509svid.SVID, error) {
	now := time.Now()
	return authority.Mint(id, now.Add(-min(ttl/10, 10*time.Second)), now.Add(ttl))
}

// Bundle returns the authority as the bundle of the trust domain.
func (authority *DevAuthority) Bundle(domain spiffeid.TrustDomain) *x509bundle.Bundle {
	return x509bundle.FromX509Authorities(domain, []*x509.Certificate{authority.cert})
}

// WriteFiles writes the SVID and the bundle to dir, as [NewFiles] reads them: tls.crt and ca.crt
// with mode 0644, tls.key with 0600. A missing dir is created with mode 0700. Each file is replaced
// atomically.
func (authority *DevAuthority) WriteFiles(dir string, svid *x509svid.SVID) error {
	cert, key, err := svid.Marshal()
	if err != nil {
		return err
	}
	bundle, err := authority.Bundle(svid.ID.TrustDomain()).Marshal()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("directory for the SVID: %w", err)
	}
	lock, err := waitLock(context.Background(), filepath.Join(dir, svidLock))
	if err != nil {
		return fmt.Errorf("directory for the SVID: %w", err)
	}
	err = durable.Replace(filepath.Join(dir, BundleFile), bundle, 0o644)
	if err == nil {
		err = durable.Replace(filepath.Join(dir, KeyFile), key, 0o600)
	}
	if err == nil {
		err = durable.Replace(filepath.Join(dir, CertFile), cert, 0o644)
	}
	return errors.Join(err, lock.Remove())
}

// minDevTTL is the minimum for certificates of whole seconds: half of it is the rotation interval.
const minDevTTL = 2 * time.Second

// NewDev returns a source that signs its own SVID for id with the development authority in dir. Run
// creates a missing authority; the processes of one machine share it. A dir that other users can
// access or whose authority is corrupt is rejected. The SVID lives for Options.DevTTL and is
// replaced at half of that. A running source adopts an authority that another process put there.
func NewDev(dir string, id spiffeid.ID, options Options) (*Source, error) {
	options.DevTTL = cmp.Or(options.DevTTL, time.Hour)
	if id.Path() == "" {
		return nil, fmt.Errorf("SPIFFE ID %q for the development authority has no path; use one such as "+
			"spiffe://example.org/lb", id)
	}
	if options.DevTTL < minDevTTL {
		return nil, fmt.Errorf("--dev-ttl=%s: the minimum is %s", options.DevTTL, minDevTTL)
	}
	if _, err := LoadDevAuthority(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	options.ID = id
	source := newSource(&dev{dir: dir, id: id, ttl: options.DevTTL, poll: pollInterval}, options)
	source.log.Warn("development authority in use: a process that can read its directory can impersonate any SPIFFE ID",
		"dir", dir, "spiffe_id", id)
	return source, nil
}

type dev struct {
	dir       string
	id        spiffeid.ID
	ttl, poll time.Duration
	authority *DevAuthority  // nil until sign has opened it
	loaded    [3]files.Stamp // stamps of the authority; zero if it may have changed
}

func (dev *dev) String() string { return "the development authority in " + dev.dir }

func (dev *dev) watch(ctx context.Context, source *Source) error {
	retry := newRetry()
	for {
		svid, err := dev.sign(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			source.fail(fmt.Errorf("%s: %w", dev, err))
			if err := retry.Wait(ctx); err != nil {
				return err
			}
			continue
		}
		retry.Reset()
		source.offer([]*x509svid.SVID{svid}, dev.authority.Bundle(dev.id.TrustDomain()))
		due := time.Now().Add(time.Until(svid.Certificates[0].NotAfter) / 2)
		if err := dev.waitRotation(ctx, source, due); err != nil {
			return err
		}
	}
}

// sign signs the next SVID and opens the authority first if necessary.
func (dev *dev) sign(ctx context.Context) (*x509svid.SVID, error) {
	if dev.authority == nil {
		authority, err := OpenDevAuthority(ctx, dev.dir)
		if err != nil {
			return nil, err
		}
		dev.authority = authority
	}
	return dev.authority.MintFor(dev.id, dev.ttl)
}

// waitRotation waits until the rotation is due or the directory has another authority. It does not
// create one: if the directory was emptied, running processes continue to trust each other.
func (dev *dev) waitRotation(ctx context.Context, source *Source, due time.Time) error {
	for time.Now().Before(due) {
		if err := backoff.Sleep(ctx, min(tick.Until(time.Now(), dev.poll), time.Until(due))); err != nil {
			return err
		}
		now, stamps := time.Now(), dev.stamps()
		if stamps == dev.loaded && stamps != [3]files.Stamp{} { // zero: no file can be opened
			continue
		}
		dev.loaded = [3]files.Stamp{}
		switch authority, err := LoadDevAuthority(dev.dir); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			source.fail(fmt.Errorf("%s: %w", dev, err))
		case !authority.cert.Equal(dev.authority.cert):
			source.log.Warn("development authority replaced", "dir", dev.dir)
			dev.authority = authority
			return nil
		case !slices.ContainsFunc(stamps[:], func(stamp files.Stamp) bool { return !stamp.Settled(now) }):
			dev.loaded = stamps
		}
	}
	return nil
}

// stamps returns the stamps of the directory and of the files that [LoadDevAuthority] reads.
// Unchanged stamps save parsing the files each second, most of the cost of an idle source.
func (dev *dev) stamps() (list [3]files.Stamp) {
	for i, path := range []string{dev.dir, filepath.Join(dev.dir, authorityCert), filepath.Join(dev.dir, authorityKey)} {
		list[i], _ = files.StampOf(path) // LoadDevAuthority returns the error
	}
	return list
}
