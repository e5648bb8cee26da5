package identity

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestNetNSHasOneOwnerPerRole(t *testing.T) {
	role := "test-" + rand.Text()
	release, err := OwnNetNS(t.Context(), role, "admin socket unix:///run/a.sock")
	harness.Must(t, err)
	want := fmt.Sprintf("another %s (pid %d, user %d, admin socket unix:///run/a.sock) owns this network namespace; "+
		"stop it first", role, os.Getpid(), os.Geteuid())
	for range 2 {
		if _, err := OwnNetNS(t.Context(), role, ""); err == nil || err.Error() != want {
			t.Errorf("beside an owner: %v, want %s", err, want)
		}
	}
	other, err := OwnNetNS(t.Context(), role+"-other", "")
	if err != nil {
		t.Errorf("another role: %v", err)
	} else {
		other()
	}
	owner := fmt.Sprintf("%s (pid %d, user %d, admin socket unix:///run/a.sock)", role, os.Getpid(), os.Geteuid())
	if got := NetNSOwner(t.Context(), role); got != owner {
		t.Errorf("owner %q, want %q", got, owner)
	}
	release()
	if got := NetNSOwner(t.Context(), role); got != "" {
		t.Errorf("owner %q after its end", got)
	}
	if release, err = OwnNetNS(t.Context(), role, ""); err != nil {
		t.Fatalf("after the owner: %v", err)
	}
	release()
}

func TestOwnerTextIsQuoted(t *testing.T) {
	for _, tt := range []struct{ name, answer, want string }{
		{"escape sequences", "\x1b[2J", `"\x1b[2J"`},
		{"endless answer", strings.Repeat("x", 1<<20), strings.Repeat("x", maxOwnerText) + ") owns"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			role := "test-" + rand.Text()
			l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", "@vipgate/"+role)
			harness.Must(t, err)
			done := make(chan struct{})
			go func() {
				defer close(done)
				if c, err := l.Accept(); err == nil {
					_, _ = c.Write([]byte(tt.answer)) // the peer closes before it has read everything
					_ = c.Close()
				}
			}()
			_, err = OwnNetNS(t.Context(), role, "")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			_ = l.Close()
			<-done
		})
	}
	t.Run("silent", func(t *testing.T) {
		role := "test-" + rand.Text()
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", "@vipgate/"+role)
		harness.Must(t, err)
		defer l.Close()
		if _, err := OwnNetNS(t.Context(), role, ""); err == nil || !strings.Contains(err.Error(), "which does not answer") {
			t.Errorf("got %v", err)
		}
	})
}
