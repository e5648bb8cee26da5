package identity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// Reason is the reason of a failed handshake in one word. It is logged as "reason".
type Reason string

// The reasons.
const (
	// ReasonWrongID: a valid SVID of an unexpected SPIFFE ID.
	ReasonWrongID Reason = "wrong_id"
	// ReasonTrustDomain: an SVID of a trust domain without a bundle.
	ReasonTrustDomain Reason = "other_trust_domain"
	// ReasonUntrusted: not signed by an authority of its trust domain.
	ReasonUntrusted Reason = "untrusted_authority"
	// ReasonExpired: a certificate after its NotAfter on the local clock.
	ReasonExpired Reason = "expired"
	// ReasonNotYetValid: a certificate before its NotBefore on the local clock.
	ReasonNotYetValid Reason = "not_yet_valid"
	// ReasonBadSVID: a certificate that is not an X.509-SVID.
	ReasonBadSVID Reason = "bad_svid"
	// ReasonNoCertificate: the peer sent none.
	ReasonNoCertificate Reason = "no_certificate"
	// ReasonNotTLS: the peer does not use TLS.
	ReasonNotTLS Reason = "not_tls"
	// ReasonNoOwnSVID: this process has no usable SVID.
	ReasonNoOwnSVID Reason = "no_own_svid"
	// ReasonRefusedByPeer: the peer sent an alert, probably about this process's SVID.
	ReasonRefusedByPeer Reason = "refused_by_peer"
	// ReasonTimeout: the peer did not finish the handshake in time.
	ReasonTimeout Reason = "timeout"
	// ReasonGone: the peer closed the connection.
	ReasonGone Reason = "gone"
	// ReasonProtocol: anything else, such as an older TLS version.
	ReasonProtocol Reason = "protocol"
)

// HandshakeError is the error of a failed handshake.
type HandshakeError struct {
	Reason Reason
	// PeerID is the claimed ID of the peer; zero if it is unknown.
	PeerID spiffeid.ID
	Err    error
}

// Error returns the reason, the peer and the cause.
func (e *HandshakeError) Error() string {
	if e.PeerID.IsZero() {
		return fmt.Sprintf("TLS handshake (%s): %v", e.Reason, e.Err)
	}
	return fmt.Sprintf("TLS handshake with %s (%s): %v", e.PeerID, e.Reason, e.Err)
}

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.Err }

// classify returns the reason of an error of the TLS layer.
func classify(err error) Reason {
	var header tls.RecordHeaderError
	var op *net.OpError
	switch {
	case errors.As(err, &header):
		return ReasonNotTLS
	case errors.As(err, &op) && op.Op == "remote error":
		return ReasonRefusedByPeer
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return ReasonTimeout
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, net.ErrClosed), errors.Is(err, io.ErrClosedPipe), errors.Is(err, context.Canceled):
		return ReasonGone
	// crypto/tls has no typed error for it; a test checks the text.
	case strings.Contains(err.Error(), "didn't provide a certificate"):
		return ReasonNoCertificate
	}
	return ReasonProtocol
}

// classifyChain returns the reason why a chain was rejected. Errors about validity include the
// local time.
func classifyChain(id spiffeid.ID, err error, now time.Time) (Reason, error) {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil:
		what := "the SVID of the peer"
		if invalid.Cert.IsCA {
			what = "an authority above the SVID of the peer"
		}
		if verr := validity(what, invalid.Cert, now); verr != nil {
			err = verr
		}
		if errors.Is(err, ErrNotYetValid) {
			return ReasonNotYetValid, err
		}
		return ReasonExpired, err
	case errors.As(err, &unknown):
		return ReasonUntrusted, fmt.Errorf("the SVID is not signed by an authority of trust domain %s: %w",
			id.TrustDomain(), err)
	}
	return ReasonBadSVID, err
}

const (
	// denialBurst lines per peer and reason are logged at once, then one per denialInterval: a
	// client that retries every 50 ms must neither fill the disk nor hide another one.
	denialBurst    = 3
	denialInterval = 10 * time.Second
	// denialKeys bounds the memory that unauthenticated peers can use.
	denialKeys = 256
)

// denialLog logs rejections, rate-limited per key.
type denialLog struct {
	out *slog.Logger

	mu      sync.Mutex
	buckets map[string]*denialBucket
}

type denialBucket struct {
	tokens     float64
	filled     time.Time
	suppressed int
}

func newDenialLog(log *slog.Logger) *denialLog {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &denialLog{out: log, buckets: make(map[string]*denialBucket)}
}

// log writes one line unless the limit of the key is reached.
func (d *denialLog) log(key, message string, attrs ...any) {
	suppressed, ok := d.take(key, time.Now())
	if !ok {
		return
	}
	if suppressed > 0 {
		attrs = append(attrs, slog.Int("suppressed", suppressed))
	}
	d.out.Warn(message, attrs...)
}

// take reports whether a line may be written, and the number of suppressed lines since the last
// one.
func (d *denialLog) take(key string, now time.Time) (suppressed int, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := d.bucket(key, now)
	b.tokens = min(denialBurst, b.tokens+now.Sub(b.filled).Seconds()/denialInterval.Seconds())
	b.filled = now
	if b.tokens < 1 {
		b.suppressed++
		return 0, false
	}
	b.tokens--
	suppressed, b.suppressed = b.suppressed, 0
	return suppressed, true
}

func (d *denialLog) bucket(key string, now time.Time) *denialBucket {
	if b, ok := d.buckets[key]; ok {
		return b
	}
	if len(d.buckets) >= denialKeys {
		for k, b := range d.buckets {
			if now.Sub(b.filled) >= denialBurst*denialInterval {
				delete(d.buckets, k)
			}
		}
	}
	if len(d.buckets) >= denialKeys {
		key = "" // further keys share one bucket
		if b, ok := d.buckets[key]; ok {
			return b
		}
	}
	b := &denialBucket{tokens: denialBurst, filled: now}
	d.buckets[key] = b
	return b
}
