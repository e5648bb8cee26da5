package readiness

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	// Causes of connections that the watcher closes.
	errNoFirstMessage = errors.New("no first message")
	errMoved          = errors.New("moved to another connection")
	errStopped        = errors.New("the watcher stops")

	errReportEnded = errors.New("the load balancer ended the report stream")
	errProtocol    = errors.New("readiness protocol violation by the load balancer")
)

// explain adds the meaning of an error that ended a connection, and the place to check, for an
// operator. cause is set if the watcher closed the connection.
func (connection *watchConn) explain(err, cause error) error {
	connection.mu.Lock()
	dial, handshake, shaken := connection.dialErr, connection.handshakeErr, connection.handshakeDone
	connection.mu.Unlock()
	socket := connection.w.path
	switch {
	case cause == errMoved, cause == errStopped:
		return cause
	// gRPC wraps these two in Unavailable and loses their types, so the connection recorded them.
	case dial != nil:
		return explainDial(socket, dial)
	case handshake != nil:
		return explainHandshake(socket, handshake)
	case cause == errNoFirstMessage:
		return fmt.Errorf("watch readiness on %s: the load balancer hangs or has not decided yet: %w within %v",
			socket, cause, connection.w.firstMessageWithin)
	case errors.Is(err, errProtocol):
		return err
	case errors.Is(err, io.EOF):
		return fmt.Errorf("readiness stream on %s: ended by the load balancer without a reason", socket)
	}
	status := status.Convert(err)
	switch status.Code() {
	case codes.PermissionDenied, codes.Unauthenticated:
		return fmt.Errorf("the load balancer on %s denied the watch: %s; check --frontend-id and --reader-id of lb: %w",
			socket, status.Message(), err)
	case codes.ResourceExhausted:
		return fmt.Errorf("the load balancer on %s refused the stream, or a message was too large: %s: %w", socket,
			status.Message(), err)
	case codes.Unimplemented:
		if fallback := connection.w.opts.Fallback; fallback != nil {
			return fmt.Errorf("the server on %s is no load balancer of vipgate or Meridio, it has neither %s nor %s: %w",
				socket, Service, fallback.Service(), err)
		}
		return fmt.Errorf("the server on %s is not a vipgate load balancer: %w", socket, err)
	case codes.Unavailable:
		if strings.Contains(status.Message(), stoppingText) {
			return fmt.Errorf("the load balancer on %s is stopping: %w", socket, err)
		}
		// In TLS 1.3 the client finishes the handshake before the server rejects its certificate.
		if shaken && !isClosed(connection.received) {
			return explainDenial(socket, status.Message(), err)
		}
		if isConnectionEnd(status.Message()) {
			return fmt.Errorf("the connection to the load balancer on %s ended: its process ended, or an SVID reached its "+
				"NotAfter: %w", socket, err)
		}
	}
	return fmt.Errorf("readiness stream on %s: %w", socket, err)
}

func explainDial(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the readiness socket %s does not exist: the load balancer is not running or listens elsewhere "+
			"(--socket of lb, --lb-socket of frontend): %w", socket, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no process listens on the readiness socket %s: the load balancer crashed or is starting: %w",
			socket, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to use the readiness socket %s: let lb and frontend run as the same user, or "+
			"share a group and give lb --socket-mode 0660: %w", socket, err)
	case errors.Is(err, syscall.EAGAIN):
		return fmt.Errorf("the readiness socket %s accepts no more connections: the load balancer hangs or is stopped: %w",
			socket, err)
	}
	return fmt.Errorf("failed to connect to the readiness socket %s: %w", socket, err)
}

func explainHandshake(socket string, err error) error {
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("the certificate of the load balancer on %s has expired or is not yet valid: check its "+
			"Identity health and both clocks: %w", socket, err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the load balancer on %s accepted the connection but did not finish the TLS handshake: it "+
			"hangs or is stopped: %w", socket, err)
	case isConnectionEnd(err.Error()):
		return fmt.Errorf("the load balancer on %s closed the connection in the TLS handshake: it has no SVID yet, or "+
			"does not speak TLS, or is stopping; its log says which: %w", socket, err)
	}
	return fmt.Errorf("TLS handshake with the load balancer on %s failed: %w", socket, err)
}

// explainDenial explains a connection that ended before the first message. In TLS 1.3 the client's
// handshake finishes before the server has verified the client's certificate, so the client sees a
// denial only as the end of the connection.
func explainDenial(socket, message string, err error) error {
	switch {
	case strings.Contains(message, "expired certificate"):
		return fmt.Errorf("the load balancer on %s reports that the frontend's SVID has expired; check the frontend's "+
			"Identity health and both clocks: %w", socket, err)
	case strings.Contains(message, "deadline exceeded"), strings.Contains(message, "i/o timeout"),
		strings.Contains(message, "use of closed"):
		// At the deadline gRPC closes the connection and reports the closed connection instead.
		return fmt.Errorf("the load balancer on %s accepted the connection but does not answer: it hangs or is stopped: %w",
			socket, err)
	case isConnectionEnd(message), strings.Contains(message, "tls: "):
		return fmt.Errorf("the load balancer on %s closed the connection right after the TLS handshake: it denied the "+
			"client's SPIFFE ID or certificate (a TLS 1.3 client sees no more than this), or was stopped; "+
			"the log of lb names the ID and the reason (compare --frontend-id of lb with the frontend's ID): %w", socket, err)
	}
	return fmt.Errorf("the load balancer on %s ended the stream before its first message: %w", socket, err)
}

// isConnectionEnd reports whether an error text describes the end of a connection without a reason.
func isConnectionEnd(message string) bool {
	ends := []string{"EOF", "connection reset", "broken pipe", "use of closed network connection", "closed connection"}
	return slices.ContainsFunc(ends, func(end string) bool { return strings.Contains(message, end) })
}
