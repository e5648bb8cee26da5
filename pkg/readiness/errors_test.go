package readiness

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

func TestErrorText(t *testing.T) {
	serve := func(s *scripted) func(*testing.T) string {
		return func(t *testing.T) string { return startScripted(t, s) }
	}
	// raw serves bare connections.
	raw := func(handle func(net.Conn)) func(*testing.T) string {
		return func(t *testing.T) string {
			path := socketPath(t)
			l, err := net.Listen("unix", path)
			harness.Must(t, err)
			var running sync.WaitGroup
			running.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					handle(c)
				}
			})
			t.Cleanup(func() { l.Close(); running.Wait() })
			return path
		}
	}
	tests := []struct {
		name string
		path func(*testing.T) string
		id   spiffeid.ID
		want []string
	}{
		{"no socket", socketPathOf, frontendID, []string{
			"does not exist", "not running or listens elsewhere",
			"--lb-socket",
		}},
		{"left-over socket", func(t *testing.T) string {
			path := socketPath(t)
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			harness.Must(t, err)
			defer syscall.Close(fd)
			harness.Must(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
			return path
		}, frontendID, []string{"no process listens", "crashed or is starting"}},
		{"no socket but a file", func(t *testing.T) string {
			path := socketPath(t)
			harness.Must(t, os.WriteFile(path, nil, 0o600))
			return path
		}, frontendID, []string{"no process listens"}},
		{"closed after the handshake", raw(func(c net.Conn) {
			_, _, _ = fakeCredentials{}.ServerHandshake(c)
			c.Close()
		}), frontendID, []string{"denied the client's SPIFFE ID", "TLS 1.3", "log of lb"}},
		{"closed after the first bytes", raw(func(c net.Conn) {
			_, _, _ = fakeCredentials{}.ServerHandshake(c)
			_, _ = c.Read(make([]byte, 1))
			c.Close()
		}), frontendID, []string{"denied the client's SPIFFE ID"}},
		{
			"not our service", serve(&scripted{err: status.Error(codes.Unimplemented, "no such method")}), frontendID,
			[]string{"not a vipgate load balancer"},
		},
		{
			"denied by role", func(t *testing.T) string { return startSyncedLB(t, 1).path }, unknownID,
			[]string{"denied the watch", unknownID.String(), "--frontend-id"},
		},
		{
			"too many streams", serve(&scripted{err: status.Error(codes.ResourceExhausted, "8 streams open")}), frontendID,
			[]string{"refused the stream", "8 streams open"},
		},
		{"stopping", serve(&scripted{err: errStopping}), frontendID, []string{"is stopping"}},
		{"ended without a status", serve(&scripted{}), frontendID, []string{"without a reason"}},
		{"ended by surprise", serve(&scripted{err: status.Error(codes.Internal, "boom")}), frontendID, []string{"boom"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := tt.path(t)
			f := startFrontend(t, path, func(o *WatcherOptions) { o.Credentials = fakeCredentials{id: tt.id} })
			f.waitFor(t, "an error", func() bool { return f.Err != nil })
			for _, w := range append(tt.want, path) {
				if !strings.Contains(f.Err.Error(), w) {
					t.Errorf("%q lacks %q", f.Err, w)
				}
			}
		})
	}
}

func socketPathOf(t *testing.T) string { return socketPath(t) }

func TestHandshakeErrorIsWrapped(t *testing.T) {
	b := startSyncedLB(t, 1)
	cause := errors.New("the peer is spiffe://example.org/other, expected spiffe://example.org/lb")
	f := startFrontend(t, b.path, func(o *WatcherOptions) {
		o.Credentials = failing{fakeCredentials{id: frontendID}, cause}
	})
	f.waitFor(t, "an error", func() bool { return f.Err != nil })
	if !errors.Is(f.Err, cause) || !strings.Contains(f.Err.Error(), "TLS handshake") {
		t.Fatalf("the error: %v", f.Err)
	}
	for err, want := range map[error]string{
		io.EOF:                   "no SVID yet, or does not speak TLS, or is stopping",
		context.DeadlineExceeded: "it hangs or is stopped",
		x509.CertificateInvalidError{Reason: x509.Expired, Detail: "now is later"}: "expired or is not yet valid",
	} {
		if got := explainHandshake("/lb.sock", fmt.Errorf("handshake: %w", err)); !errors.Is(got, err) ||
			!strings.Contains(got.Error(), want) {
			t.Errorf("%v: %v", err, got)
		}
	}
}

func TestSilentLBTimeout(t *testing.T) {
	tests := []struct {
		name string
		impl func(*testing.T) (path string)
		want string
	}{
		{
			"opens the watch and hangs", func(t *testing.T) string { return startScripted(t, &scripted{hold: true}) },
			"the load balancer hangs or has not",
		},
		{"has not decided yet", func(t *testing.T) string {
			path := socketPath(t)
			startLB(t, path, NewTable(TableOptions{}))
			return path
		}, "has not decided yet"},
		{"accepts and hangs", func(t *testing.T) string {
			path := socketPath(t)
			l, err := net.Listen("unix", path) // the kernel accepts
			harness.Must(t, err)
			t.Cleanup(func() { l.Close() })
			return path
		}, "does not answer: it hangs or is stopped"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := tt.impl(t)
			f := &frontend{log: &harness.Log{}, Watcher: NewWatcher(WatcherOptions{
				Target:      path,
				Credentials: fakeCredentials{id: frontendID},
			})}
			f.handshakeWithin, f.firstMessageWithin = 50*time.Millisecond, 50*time.Millisecond
			harness.Run(t, f.Run)
			// On a busy machine the handshake may be the first to time out.
			f.waitFor(t, "it is left: "+tt.want, func() bool { return f.Err != nil && strings.Contains(f.Err.Error(), tt.want) })
			if !strings.Contains(f.Err.Error(), path) {
				t.Fatalf("the error: %v", f.Err)
			}
			await.True(t, "and tried again", func() bool { return f.Stats().Failures >= 2 })
		})
	}
}

type failing struct {
	fakeCredentials
	err error
}

func (f failing) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, f.err
}
func (f failing) Clone() credentials.TransportCredentials { return f }
