package readiness

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Why a link was ended by us.
var (
	errSilent  = errors.New("no first message")
	errMoved   = errors.New("moved to another connection")
	errStopped = errors.New("the watcher stops")
)

// explain says in words what ended a link, or kept it from opening: what was
// seen, what that means, and where to look.
func (l *link) explain(err error) error {
	l.mu.Lock()
	dial, handshake, shaken := l.dialErr, l.handshakeErr, l.shaken
	l.mu.Unlock()
	socket := l.w.path
	switch {
	case dial != nil:
		return explainDial(socket, dial)
	case handshake != nil:
		return explainHandshake(socket, handshake)
	case errors.Is(err, errSilent):
		return fmt.Errorf("the load balancer on %s opened the watch but says nothing: it hangs, or has not made its first decision: %w within %v", socket, err, l.w.firstMessageWithin)
	}
	var broken *brokenError
	if errors.As(err, &broken) {
		return err
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the load balancer ended the stream on %s without a reason", socket)
	}
	s := status.Convert(err)
	switch s.Code() {
	case codes.PermissionDenied, codes.Unauthenticated:
		return fmt.Errorf("the load balancer on %s denied the watch: %s (see --frontend-id and --reader-id of lb): %w", socket, s.Message(), err)
	case codes.ResourceExhausted:
		return fmt.Errorf("the load balancer on %s refused the stream, or a message was too large: %s: %w", socket, s.Message(), err)
	case codes.Unimplemented:
		return fmt.Errorf("what listens on %s is not a load balancer of ours: %w", socket, err)
	case codes.Unavailable:
		if strings.Contains(s.Message(), stoppingText) {
			return fmt.Errorf("the load balancer on %s is stopping: %w", socket, err)
		}
		if shaken && !l.spoken() {
			return explainDenial(socket, s.Message(), err)
		}
		if cut(s.Message()) {
			return fmt.Errorf("the connection to the load balancer on %s ended: its process ended, or an SVID reached its NotAfter: %w", socket, err)
		}
	}
	return fmt.Errorf("readiness stream on %s: %w", socket, err)
}

func explainDial(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the readiness socket %s does not exist: the load balancer is not running or listens elsewhere (--socket of lb, --lb-socket of frontend): %w", socket, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody listens on the readiness socket %s: the load balancer died and left it behind, or is just starting: %w", socket, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to use the readiness socket %s: let lb and frontend run as the same user, or share a group and give lb --socket-mode 0660: %w", socket, err)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("the readiness socket %s takes no more connections: the load balancer hangs or is stopped: %w", socket, err)
	}
	return fmt.Errorf("connect to the readiness socket %s: %w", socket, err)
}

func explainHandshake(socket string, err error) error {
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("the certificate of the load balancer on %s has expired or is not yet valid: see its Identity health and both clocks: %w", socket, err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the load balancer on %s took the connection but did not finish the TLS handshake: it hangs or is stopped: %w", socket, err)
	case cut(err.Error()):
		return fmt.Errorf("the load balancer on %s closed the connection in the TLS handshake: it has no SVID yet, or does not speak TLS, or is stopping; its log says which: %w", socket, err)
	}
	return fmt.Errorf("TLS handshake with the load balancer on %s failed: %w", socket, err)
}

// explainDenial explains a connection that ended before the load balancer had
// spoken. In TLS 1.3 the client's handshake is over before the server has
// looked at the client's certificate, so a denial shows only as the end.
func explainDenial(socket, message string, err error) error {
	switch {
	case strings.Contains(message, "expired certificate"):
		return fmt.Errorf("the load balancer on %s says that our SVID has expired: see the frontend's Identity health and both clocks: %w", socket, err)
	case strings.Contains(message, "deadline exceeded"), strings.Contains(message, "i/o timeout"), strings.Contains(message, "use of closed"):
		// gRPC closes the connection at its deadline, and then reports that.
		return fmt.Errorf("the load balancer on %s took the connection but does not answer: it hangs or is stopped: %w", socket, err)
	case cut(message), strings.Contains(message, "tls: "):
		return fmt.Errorf("the load balancer on %s closed the connection right after the TLS handshake: it denied our SPIFFE ID or certificate (a TLS 1.3 client sees no more than this), or was stopped; "+
			"the log of lb names the ID and the reason (compare --frontend-id of lb with the frontend's ID): %w", socket, err)
	}
	return fmt.Errorf("the load balancer on %s ended the stream before it spoke: %w", socket, err)
}

// cut tells whether an error is the bare end of a connection.
func cut(message string) bool {
	for _, sign := range []string{"EOF", "connection reset", "broken pipe", "use of closed network connection", "closed connection"} {
		if strings.Contains(message, sign) {
			return true
		}
	}
	return false
}

// brokenError is a violation of the protocol by the load balancer.
type brokenError struct{ err error }

func (e *brokenError) Error() string {
	return "the load balancer broke the readiness protocol: " + e.err.Error()
}
func (e *brokenError) Unwrap() error { return e.err }
