package healthcheck

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/vipgate/vipgate/pkg/files"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// maxAuthorities bounds a file of authorities. The Mozilla bundle has 250 KB.
	maxAuthorities = 4 << 20
	// settled is how long ago a file must have been written for its time and size
	// to tell the next write apart, whatever the clock of its file system.
	settled = 2 * time.Second
)

// secured is how the checks of a stream speak TLS. It may be used by many goroutines at once.
type secured struct {
	trench.TLSCheck

	mu          sync.Mutex // of calls: one that waits is not one that hangs
	calls       files.Calls
	info        os.FileInfo // of CAFile when it was read; nil: read it again
	authorities *x509.CertPool
}

// config returns the configuration for a connection to the target. The error says that the check
// cannot run.
func (s *secured) config(ctx context.Context, at netip.Addr) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         s.ServerName,
		InsecureSkipVerify: s.Insecure, // as the trench file asks for in so many words
	}
	if c.ServerName == "" {
		c.ServerName = at.String()
	}
	if s.CAFile == "" {
		return c, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	c.RootCAs, err = files.Do(ctx, &s.calls, "caFile "+s.CAFile, s.pool)
	return c, err
}

// pool returns the authorities of the file as it is now. Files that are replaced
// and files that are written over are both seen.
func (s *secured) pool() (*x509.CertPool, error) {
	info, err := os.Stat(s.CAFile)
	if err != nil {
		s.info = nil
		return nil, fmt.Errorf("caFile: %w", err)
	}
	if s.info != nil && os.SameFile(info, s.info) && info.ModTime().Equal(s.info.ModTime()) && info.Size() == s.info.Size() {
		return s.authorities, nil
	}
	s.info = nil
	data, err := files.Read(s.CAFile, maxAuthorities)
	if err != nil {
		return nil, fmt.Errorf("caFile: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("caFile: %s has no certificate in PEM", s.CAFile)
	}
	if time.Since(info.ModTime()) > settled {
		s.info, s.authorities = info, pool
	}
	return pool, nil
}

// handshakeFailure is the outcome of a TLS handshake that ended with an error.
func handshakeFailure(check *trench.Check, port uint16, name string, err error) outcome {
	var (
		unknown x509.UnknownAuthorityError
		other   x509.HostnameError
		invalid x509.CertificateInvalidError
		roots   x509.SystemRootsError
		record  tls.RecordHeaderError
		errno   syscall.Errno
	)
	switch {
	case timedOut(err):
		return wrong(port, "connected, but no TLS handshake in %s", check.Timeout)
	case errors.As(err, &roots):
		return outcome{verdict: unmade, reason: "check not run: this machine has no file of authorities: write tls.caFile"}
	case errors.As(err, &unknown):
		return wrong(port, "the certificate is signed by an authority that is not trusted")
	case errors.As(err, &other):
		return wrong(port, "the certificate is not for %s", name)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return wrong(port, "the certificate is valid from %s to %s only", date(invalid.Cert.NotBefore), date(invalid.Cert.NotAfter))
	case errors.As(err, &invalid):
		return wrong(port, "the certificate is not valid: %s", remark(err.Error()))
	case errors.As(err, &record):
		return wrong(port, "no TLS here")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return wrong(port, "closed the connection in the TLS handshake")
	case errors.Is(err, errNoHTTP2):
		return wrong(port, "%v", err)
	case errors.As(err, &errno):
		return failure(check, port, err)
	}
	return wrong(port, "TLS handshake: %s", remark(err.Error()))
}

func date(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// wrong is the outcome of a check that failed though the target answered: the
// network is there.
func wrong(port uint16, format string, args ...any) outcome {
	return outcome{verdict: failed, reason: fmt.Sprintf("port %d: ", port) + fmt.Sprintf(format, args...)}
}

func timedOut(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// remark makes words that came from a target fit for a line of a log: short, and
// without anything that plays tricks on a terminal.
func remark(s string) string {
	const enough = 120
	for i := range s {
		if i >= enough {
			s = s[:i] + "…"
			break
		}
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(c rune) bool { return !strconv.IsPrint(c) }) {
		return strconv.Quote(s)
	}
	return s
}

// reset has a connection ended by a reset when it is closed, which leaves no
// socket in TIME_WAIT on either side.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // without it, it is closed in the usual way
	}
}
