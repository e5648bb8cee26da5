package healthcheck

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/trench"
)

// maxTLSFile bounds a file of authorities, certificates or a key. The Mozilla bundle has 250 KB.
const maxTLSFile = 4 << 20

// tlsConfig is the TLS configuration of a stream's checks. It is safe for concurrent use.
type tlsConfig struct {
	trench.TLSCheck
	protocols []string // for ALPN

	mu     sync.Mutex // held during calls, so that a caller that waits is not reported as hung
	calls  files.Calls
	files  tlsFiles // from which loaded was parsed
	loaded struct {
		authorities  *x509.CertPool
		certificates []tls.Certificate // at most one
	}
}

type tlsFiles struct{ ca, cert, key tlsFile }

// tlsFile is a file with its stamp, which is zero if a later change may leave it equal.
type tlsFile struct {
	data  []byte
	stamp files.Stamp
}

// of returns the configuration for a connection to the target. With an error no check can run.
func (config *tlsConfig) of(ctx context.Context, address netip.Addr) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         config.ServerName,
		NextProtos:         config.protocols,
		InsecureSkipVerify: config.Insecure, // explicitly requested by the trench file
	}
	if c.ServerName == "" {
		c.ServerName = address.String()
	}
	if config.CAFile == "" && config.CertFile == "" {
		return c, nil
	}
	config.mu.Lock()
	defer config.mu.Unlock()
	config.calls.Path = cmp.Or(config.CAFile, config.CertFile)
	known := config.files
	read, err := files.Do(ctx, &config.calls, "TLS files such as "+config.calls.Path,
		func() (tlsFiles, error) { return config.readFiles(known) })
	if err != nil {
		return nil, err
	}
	// Parsing costs far more than reading.
	if config.loaded.authorities == nil || !bytes.Equal(read.ca.data, config.files.ca.data) {
		if config.loaded.authorities, err = parsePool(config.CAFile, read.ca.data); err != nil {
			return nil, err
		}
	}
	if config.loaded.certificates == nil || !bytes.Equal(read.cert.data, config.files.cert.data) ||
		!bytes.Equal(read.key.data, config.files.key.data) {
		if config.loaded.certificates, err = config.parsePair(read); err != nil {
			return nil, err
		}
	}
	config.files = read
	c.RootCAs, c.Certificates = config.loaded.authorities, config.loaded.certificates
	return c, nil
}

// readFiles reads the files that are not known. Every check of the stream waits for it, one after
// the other, and a bundle of authorities takes a millisecond.
func (config *tlsConfig) readFiles(known tlsFiles) (read tlsFiles, err error) {
	read = known
	for _, file := range []struct {
		field, path string
		to          *tlsFile
	}{
		{"caFile", config.CAFile, &read.ca},
		{"certFile", config.CertFile, &read.cert},
		{"keyFile", config.KeyFile, &read.key},
	} {
		if file.path == "" {
			continue
		}
		// Take the stamp before reading, so that it is not newer than the content.
		now := time.Now()
		stamp, err := files.StampOf(file.path)
		if err == nil && stamp == file.to.stamp {
			continue
		}
		if err == nil {
			file.to.data, err = files.Read(file.path, maxTLSFile)
		}
		if err != nil {
			return read, fmt.Errorf("%s: %w", file.field, err)
		}
		if file.to.stamp = (files.Stamp{}); stamp.Settled(now) {
			file.to.stamp = stamp
		}
	}
	return read, nil
}

// parsePool returns the authorities of a file; nil, the system's, without a file.
func parsePool(path string, data []byte) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("caFile: %s has no certificate in PEM", path)
	}
	return pool, nil
}

// parsePair returns the client certificate; none without its files. A check between the
// replacements of the two files does not run, so it does not count against the target.
func (config *tlsConfig) parsePair(read tlsFiles) ([]tls.Certificate, error) {
	if config.CertFile == "" {
		return nil, nil
	}
	pair, err := tls.X509KeyPair(read.cert.data, read.key.data) // its errors have no content of the files
	if err != nil {
		return nil, fmt.Errorf("certFile %s and keyFile %s: %w", config.CertFile, config.KeyFile, err)
	}
	return []tls.Certificate{pair}, nil
}

// handshakeFailure is the outcome of a TLS handshake that ended with an error.
func (plan *plan) handshakeFailure(name string, err error) outcome {
	var (
		unknown x509.UnknownAuthorityError
		other   x509.HostnameError
		invalid x509.CertificateInvalidError
		roots   x509.SystemRootsError
		record  tls.RecordHeaderError
	)
	switch {
	case errors.As(err, &roots):
		return unavailable(errors.New("this machine has no file of authorities: write tls.caFile"))
	case errors.As(err, &unknown):
		return plan.wrong("the certificate is signed by an authority that is not trusted")
	case errors.As(err, &other):
		return plan.wrong("the certificate is not for %s", name)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		c := invalid.Cert
		return plan.wrong("the certificate is valid from %s to %s only", date(c.NotBefore), date(c.NotAfter))
	case errors.As(err, &invalid):
		return plan.wrong("the certificate is not valid: %s", remark(err.Error()))
	case errors.As(err, &record):
		return plan.wrong("no TLS here")
	}
	return plan.broken("no TLS handshake", "TLS handshake: ", err)
}

func date(t time.Time) string { return t.UTC().Format(time.RFC3339) }
