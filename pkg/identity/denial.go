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

// Reason says in one word why a handshake failed. It is logged as "reason".
type Reason string

// The reasons.
const (
	// ReasonWrongID: a valid SVID, but not of an expected SPIFFE ID.
	ReasonWrongID Reason = "wrong_id"
	// ReasonTrustDomain: an SVID of a trust domain that we have no bundle for.
	ReasonTrustDomain Reason = "other_trust_domain"
	// ReasonUntrusted: not signed by an authority of its trust domain.
	ReasonUntrusted Reason = "untrusted_authority"
	// ReasonExpired: a certificate after its NotAfter, by our clock.
	ReasonExpired Reason = "expired"
	// ReasonNotYetValid: a certificate before its NotBefore, by our clock.
	ReasonNotYetValid Reason = "not_yet_valid"
	// ReasonBadSVID: a certificate that is no X.509-SVID.
	ReasonBadSVID Reason = "bad_svid"
	// ReasonNoCertificate: the peer showed none.
	ReasonNoCertificate Reason = "no_certificate"
	// ReasonNotTLS: the peer does not speak TLS.
	ReasonNotTLS Reason = "not_tls"
	// ReasonNoOwnSVID: we have no usable SVID ourselves.
	ReasonNoOwnSVID Reason = "no_own_svid"
	// ReasonRefusedByPeer: the peer sent an alert, most likely about our SVID.
	ReasonRefusedByPeer Reason = "refused_by_peer"
	// ReasonTimeout: the peer did not finish the handshake in time.
	ReasonTimeout Reason = "timeout"
	// ReasonGone: the peer closed the connection.
	ReasonGone Reason = "gone"
	// ReasonProtocol: anything else, such as an older TLS version.
	ReasonProtocol Reason = "protocol"
)

// HandshakeError says why a handshake failed.
type HandshakeError struct {
	Reason Reason
	// PeerID is what the peer claimed to be; zero if it did not come so far.
	PeerID spiffeid.ID
	Err    error
}

// Error names the reason and the peer.
func (e *HandshakeError) Error() string {
	if e.PeerID.IsZero() {
		return fmt.Sprintf("TLS handshake (%s): %v", e.Reason, e.Err)
	}
	return fmt.Sprintf("TLS handshake with %s (%s): %v", e.PeerID, e.Reason, e.Err)
}

// Unwrap returns the cause.
func (e *HandshakeError) Unwrap() error { return e.Err }

// classify names the reason of a failure in the TLS layer.
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
	// crypto/tls has no typed error for it; a test holds it to its words.
	case strings.Contains(err.Error(), "didn't provide a certificate"):
		return ReasonNoCertificate
	}
	return ReasonProtocol
}

// classifyChain names the reason why a chain was not accepted. The time is put
// into words of ours, with the clock.
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
		return ReasonUntrusted, fmt.Errorf("the SVID is not signed by an authority of trust domain %s: %w", id.TrustDomain(), err)
	}
	return ReasonBadSVID, err
}

const (
	// denialBurst lines about one peer and reason are logged at once, then one
	// every denialInterval: a client that retries every 50 ms must not fill the
	// disk, and yet must not hide another one.
	denialBurst    = 3
	denialInterval = 10 * time.Second
	// denialKeys bounds the memory that strangers can make us use.
	denialKeys = 256
)

// denialLog logs refusals, rate-limited per key.
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

// log writes one line, unless there were too many of that key.
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

// take says whether a line may be written, and how many were not since the last.
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
		key = "" // all newcomers share one
		if b, ok := d.buckets[key]; ok {
			return b
		}
	}
	b := &denialBucket{tokens: denialBurst, filled: now}
	d.buckets[key] = b
	return b
}
