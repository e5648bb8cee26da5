package healthcheck

import (
	"bytes"
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

// maxAuthorities bounds a file of authorities. The Mozilla bundle has 250 KB.
const maxAuthorities = 4 << 20

// tlsConfig is the TLS configuration of a stream's checks. It is safe for concurrent use.
type tlsConfig struct {
	trench.TLSCheck
	protocols []string // for ALPN

	mu          sync.Mutex // held during calls, so that a caller that waits is not reported as hung
	calls       files.Calls
	data        []byte // of CAFile
	authorities *x509.CertPool
}

// of returns the configuration for a connection to the target. The error means that the check
// cannot run.
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
	if config.CAFile == "" {
		return c, nil
	}
	config.mu.Lock()
	defer config.mu.Unlock()
	config.calls.Path = config.CAFile
	data, err := files.Do(ctx, &config.calls, "caFile "+config.CAFile, func() ([]byte, error) {
		data, err := files.Read(config.CAFile, maxAuthorities)
		if err != nil {
			err = fmt.Errorf("caFile: %w", err)
		}
		return data, err
	})
	if err != nil {
		return nil, err
	}
	c.RootCAs, err = config.pool(data)
	return c, err
}

// pool returns the authorities in data, the content of the file.
func (config *tlsConfig) pool(data []byte) (*x509.CertPool, error) {
	if config.authorities == nil || !bytes.Equal(data, config.data) { // parsing costs far more than reading
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(data) {
			return nil, fmt.Errorf("caFile: %s has no certificate in PEM", config.CAFile)
		}
		config.data, config.authorities = data, pool
	}
	return config.authorities, nil
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
