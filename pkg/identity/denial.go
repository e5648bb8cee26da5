package identity

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// Reason is the reason of a failed handshake in one word. It is logged as "reason".
type Reason string

// The reasons.
const (
	ReasonWrongID       Reason = "wrong_id"            // a valid SVID of an unexpected SPIFFE ID
	ReasonTrustDomain   Reason = "other_trust_domain"  // an SVID of a trust domain without a bundle
	ReasonUntrusted     Reason = "untrusted_authority" // not signed by an authority of its trust domain
	ReasonExpired       Reason = "expired"             // after its NotAfter on the local clock
	ReasonNotYetValid   Reason = "not_yet_valid"       // before its NotBefore on the local clock
	ReasonBadSVID       Reason = "bad_svid"            // a certificate that is not an X.509-SVID
	ReasonNoCertificate Reason = "no_certificate"      // the peer sent none
	ReasonNotTLS        Reason = "not_tls"             // the peer does not use TLS
	ReasonNoOwnSVID     Reason = "no_own_svid"         // this process has no usable SVID
	ReasonRefusedByPeer Reason = "refused_by_peer"     // an alert, probably about this process's SVID
	ReasonTimeout       Reason = "timeout"             // the peer did not finish the handshake in time
	ReasonGone          Reason = "gone"                // the peer closed the connection
	ReasonProtocol      Reason = "protocol"            // anything else, such as an older TLS version
)

// HandshakeError is the error of a failed handshake.
type HandshakeError struct {
	Reason Reason
	// PeerID is the claimed ID of the peer; zero if unknown.
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

// classifyChain returns why a chain was rejected. Errors about validity include the local time.
func classifyChain(id spiffeid.ID, err error, now time.Time) (Reason, error) {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil:
		what := "the SVID of the peer"
		if invalid.Cert.IsCA {
			what = "an authority above the SVID of the peer"
		}
		err = cmp.Or(validity(what, invalid.Cert, now), err)
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
