package identity_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// userCredentials returns credentials that authorize users.
func userCredentials(t *testing.T, uids ...uint32) credentials.TransportCredentials {
	t.Helper()
	source, err := identity.NewPeerCredentials(identity.Options{})
	must(t, err)
	identitytest.Run(t, source)
	<-source.Ready()
	if own := source.Status().Load(); own.Problem() != "" || own.ID != identity.UserID(uint32(os.Geteuid())) {
		t.Fatalf("got %+v", own)
	}
	if _, err := source.GetX509SVID(); err == nil {
		t.Fatal("an SVID")
	}
	var ids []spiffeid.ID
	for _, uid := range uids {
		ids = append(ids, identity.UserID(uid))
	}
	return identity.NewCredentials(source, identity.CredentialOptions{Authorize: identity.Authorize(ids...)})
}

func TestPeerCredentialsOfUser(t *testing.T) {
	own := uint32(os.Geteuid())
	path, w := serve(t, userCredentials(t, own))
	must(t, check(t, client(t, path, userCredentials(t, own))))
	if got := w.caller.Load(); got != identity.UserID(own) {
		t.Errorf("the server saw %v", got)
	}
	// Each side refuses a user that it does not expect.
	err := check(t, client(t, path, userCredentials(t, own+1)))
	harness.WantError(t, err, "the peer is "+identity.UserID(own).String()+", expected "+identity.UserID(own+1).String())
	other, _ := serve(t, userCredentials(t, own+1))
	if err := check(t, client(t, other, userCredentials(t, own))); err == nil {
		t.Error("the server accepts any user")
	}
}

// The kernel reports the user of the thread that connects, whatever the process claims.
func TestPeerCredentialsOfForeignUser(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.Skip(t, "root, to connect as another user")
	}
	const foreign, unmapped = 12345, 65534
	listener, err := net.Listen("unix", "@vipgate-test/"+t.Name()) // no permissions of a file
	must(t, err)
	defer listener.Close()
	handshake := func(uid int, server credentials.TransportCredentials) error {
		t.Helper()
		dialed := make(chan net.Conn, 1)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine
			if _, _, errno := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
				t.Error(errno)
			}
			conn, err := net.Dial("unix", listener.Addr().String())
			harness.Check(t, err)
			dialed <- conn
		}()
		raw, err := listener.Accept()
		must(t, err)
		defer raw.Close()
		defer (<-dialed).Close()
		_, info, err := server.ServerHandshake(raw)
		caller := identity.Caller(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: info}))
		if err == nil && (info.(identity.AuthInfo).ID != identity.UserID(uint32(uid)) || caller != fmt.Sprint("uid ", uid)) {
			t.Errorf("got %+v, caller %s", info, caller)
		}
		return err
	}
	must(t, handshake(foreign, userCredentials(t, foreign)))
	harness.WantError(t, handshake(foreign, userCredentials(t, 0)), "uid/12345, expected spiffe://localhost/uid/0")
	harness.WantError(t, handshake(unmapped, userCredentials(t, unmapped)), "does not map")
}

func TestPeerCredentialsNeverOverTCP(t *testing.T) {
	own := uint32(os.Geteuid())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	must(t, err)
	_, _, err = userCredentials(t, own).ClientHandshake(context.Background(), "", conn)
	harness.WantError(t, err, "is not on a unix socket")
	raw, err := listener.Accept()
	must(t, err)
	_, _, err = userCredentials(t, own).ServerHandshake(raw)
	harness.WantError(t, err, "is not on a unix socket")
}

func TestUserIDs(t *testing.T) {
	for text, want := range map[string]bool{
		"spiffe://localhost/uid/0": true, "spiffe://localhost/uid/4294967295": true,
		"spiffe://localhost/uid/01": false, "spiffe://localhost/uid/4294967296": false, "spiffe://localhost/uid/x": false,
		"spiffe://localhost/uid": false, "spiffe://example.org/uid/1": false, "spiffe://localhost/uid/1/2": false,
	} {
		uid, ok := identity.UserOf(spiffeid.RequireFromString(text))
		if ok != want || ok && !strings.HasSuffix(text, "/uid/"+strings.TrimPrefix(identity.UserID(uid).Path(), "/uid/")) {
			t.Errorf("%s: %d, %v", text, uid, ok)
		}
	}
}
