package identity

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/vipgate/vipgate/pkg/files"
)

const (
	authorityCert = "ca.crt"
	authorityKey  = "ca.key"
	authorityLock = "ca.lock"
	// authorityTTL exceeds the lifetime of a development machine.
	authorityTTL = 10 * 365 * 24 * time.Hour
	// authorityWait bounds the wait for another process that creates the authority, which takes
	// milliseconds.
	authorityWait = 10 * time.Second
)

// DevAuthority signs X.509-SVIDs of any trust domain. It is for the processes of one machine and
// for tests: a process that can read its key can impersonate any ID.
type DevAuthority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// NewDevAuthority returns an authority in memory.
func NewDevAuthority() (*DevAuthority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key of the development authority: %w", err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject: pkix.Name{
			Organization: []string{"vipgate development"},
			CommonName:   "development authority " + serial.Text(16),
		},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(authorityTTL),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("certificate of the development authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("certificate of the development authority: %w", err)
	}
	return &DevAuthority{cert: cert, key: key}, nil
}

// OpenDevAuthority returns the authority in dir and creates it when missing: dir with mode 0700,
// ca.crt and ca.key with 0600. Concurrent processes agree on one. A directory or key that other
// users could have read or written is rejected.
func OpenDevAuthority(dir string) (*DevAuthority, error) {
	return openAuthority(context.Background(), dir)
}

// LoadDevAuthority returns the authority in dir and does not create one, since no running process
// would trust it.
func LoadDevAuthority(dir string) (*DevAuthority, error) {
	if err := checkAuthority(dir); err != nil {
		return nil, err
	}
	a, err := loadAuthority(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("no development authority in %s; use the directory of a running process, which creates it",
			dir)
	}
	return a, err
}

func openAuthority(ctx context.Context, dir string) (*DevAuthority, error) {
	if dir == "" {
		return nil, errNoAuthorityDir
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("directory of the development authority: %w", err)
	}
	if err := checkPermissions(dir, 0o022); err != nil {
		return nil, fmt.Errorf("directory of the development authority: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, authorityWait)
	defer cancel()
	lock, err := waitLock(ctx, filepath.Join(dir, authorityLock))
	if err != nil {
		return nil, fmt.Errorf("development authority in %s: %w", dir, err)
	}
	defer lock.release()

	a, err := loadAuthority(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return a, err
	}
	// The certificate is written last: without it no process has used the key.
	if a, err = NewDevAuthority(); err != nil {
		return nil, err
	}
	key, err := encodeKey(a.key)
	if err != nil {
		return nil, err
	}
	if err := replaceFile(dir, authorityKey, key, 0o600); err != nil {
		return nil, fmt.Errorf("development authority: %w", err)
	}
	if err := replaceFile(dir, authorityCert, encodeCerts(a.cert), 0o600); err != nil {
		return nil, fmt.Errorf("development authority: %w", err)
	}
	return a, nil
}

var errNoAuthorityDir = errors.New("no directory for the development authority")

// checkAuthority returns the error of OpenDevAuthority without creating anything.
func checkAuthority(dir string) error {
	if dir == "" {
		return errNoAuthorityDir
	}
	switch err := checkPermissions(dir, 0o022); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("directory of the development authority: %w", err)
	}
	if _, err := loadAuthority(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// loadAuthority reads the authority in dir. The error is fs.ErrNotExist when its certificate does
// not exist.
func loadAuthority(dir string) (*DevAuthority, error) {
	certPath, keyPath := filepath.Join(dir, authorityCert), filepath.Join(dir, authorityKey)
	certPEM, err := files.Read(certPath, maxFile)
	if err != nil {
		return nil, fmt.Errorf("development authority: %w", err)
	}
	certs, err := certificates(certPEM)
	if err != nil {
		return nil, fmt.Errorf("development authority %s: %w; remove %s to create a new one", certPath, err, dir)
	}
	if err := checkPermissions(keyPath, 0o077); err != nil {
		// Not ErrNotExist: a certificate without its key is a corrupt authority.
		return nil, fmt.Errorf("key of the development authority: %s; restore it or remove %s to create a new one", err, dir)
	}
	keyPEM, err := files.Read(keyPath, maxFile)
	if err != nil {
		return nil, fmt.Errorf("key of the development authority: %w", err)
	}
	der, err := privateKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("development authority %s: %w; remove %s to create a new one", keyPath, err, dir)
	}
	key, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("development authority %s: %w", keyPath, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("development authority %s: a %T cannot sign", keyPath, key)
	}
	if p, ok := certs[0].PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !p.Equal(signer.Public()) {
		return nil, fmt.Errorf("development authority: %s does not belong to %s; remove %s to create a new one", keyPath,
			certPath, dir)
	}
	if err := validity("development authority "+certPath, certs[0], time.Now()); err != nil {
		return nil, fmt.Errorf("%w; remove %s to create a new one", err, dir)
	}
	return &DevAuthority{cert: certs[0], key: signer}, nil
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
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, not to user %d or root", path, st.Uid, os.Geteuid())
	}
	return nil
}

// Mint signs an SVID for id. Certificates hold whole seconds: notBefore is rounded down, notAfter
// up.
func (a *DevAuthority) Mint(id spiffeid.ID, notBefore, notAfter time.Time) (*x509svid.SVID, error) {
	if id.Path() == "" {
		return nil, fmt.Errorf("SPIFFE ID %q has no path", id)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("key for %s: %w", id, err)
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// The URI alone identifies the workload.
		Subject:               pkix.Name{Organization: []string{"vipgate development"}},
		NotBefore:             notBefore.Truncate(time.Second),
		NotAfter:              notAfter.Add(time.Second - 1).Truncate(time.Second),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{id.URL()},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("SVID for %s: %w", id, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("SVID for %s: %w", id, err)
	}
	return &x509svid.SVID{ID: id, Certificates: []*x509.Certificate{cert}, PrivateKey: key}, nil
}

// MintFor signs an SVID for id that is valid from now, a little back-dated, for ttl.
func (a *DevAuthority) MintFor(id spiffeid.ID, ttl time.Duration) (*x509svid.SVID, error) {
	now := time.Now()
	return a.Mint(id, now.Add(-min(ttl/10, 10*time.Second)), now.Add(ttl))
}

// Bundle returns the authority as the bundle of the trust domain.
func (a *DevAuthority) Bundle(td spiffeid.TrustDomain) *x509bundle.Bundle {
	return x509bundle.FromX509Authorities(td, []*x509.Certificate{a.cert})
}

// WriteFiles writes the SVID and the bundle to dir, as [NewFiles] reads them: tls.crt and ca.crt
// with mode 0644, tls.key with 0600. A missing dir is created with mode 0700. Each file is replaced
// atomically.
func (a *DevAuthority) WriteFiles(dir string, svid *x509svid.SVID) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("directory for the SVID: %w", err)
	}
	key, err := encodeKey(svid.PrivateKey)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		data []byte
		mode fs.FileMode
	}{
		{BundleFile, encodeCerts(a.cert), 0o644},
		{KeyFile, key, 0o600},
		{CertFile, encodeCerts(svid.Certificates...), 0o644},
	} {
		if err := replaceFile(dir, f.name, f.data, f.mode); err != nil {
			return fmt.Errorf("SVID for %s: %w", svid.ID, err)
		}
	}
	return nil
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("serial number: %w", err)
	}
	return serial.Add(serial, big.NewInt(1)), nil
}

func encodeCerts(certs ...*x509.Certificate) []byte {
	var b bytes.Buffer
	for _, c := range certs {
		b.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))
	}
	return b.Bytes()
}

func encodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// replaceFile replaces dir/name atomically and never with a wider mode.
func replaceFile(dir, name string, data []byte, mode fs.FileMode) (err error) {
	f, err := os.CreateTemp(dir, "."+name+"-*") // created with mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(dir, name))
}
