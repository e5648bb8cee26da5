package bird

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

// conversation returns a client whose server sends a greeting and then runs respond.
func conversation(t *testing.T, greeting string, respond func(net.Conn)) (*Client, error) {
	t.Helper()
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := theirs.Write([]byte(greeting)); err == nil {
			respond(theirs)
		}
	}()
	t.Cleanup(func() { ours.Close(); theirs.Close(); <-done })
	return newClient(t.Context(), ours)
}

const greeting = "0001 BIRD 2.0.12 ready.\n"

func TestCommandDeadline(t *testing.T) {
	reads := func(c net.Conn) { _, _ = bufio.NewReader(c).ReadString('\n') }
	for name, respond := range map[string]func(net.Conn){
		"no read":             func(net.Conn) {},
		"no answer":           reads,
		"half an answer":      func(c net.Conn) { reads(c); _, _ = c.Write([]byte("1002-NBR-a BGP\n")) },
		"answer without end":  func(c net.Conn) { reads(c); drip(c, "1002-x\n") },
		"asynchronous lines":  func(c net.Conn) { reads(c); drip(c, "+x\n") },
		"a line without end":  func(c net.Conn) { reads(c); drip(c, "x") },
		"continuations, slow": func(c net.Conn) { reads(c); drip(c, "1002-x\n y\n") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, err := conversation(t, greeting, respond)
				harness.Must(t, err)
				begin := time.Now()
				reply, err := c.Command(t.Context(), "show status")
				if reply != nil || !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begin) != commandTimeout {
					t.Errorf("after %v: %v, %v", time.Since(begin), reply, err)
				}
			})
		})
	}
}

// drip repeats a text forever, ten times a second.
func drip(c net.Conn, text string) {
	for {
		if _, err := c.Write([]byte(text)); err != nil {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
}

func TestContextInterruptsCommand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := conversation(t, greeting, func(c net.Conn) { _, _ = bufio.NewReader(c).ReadString('\n') })
		harness.Must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(300*time.Millisecond, cancel)
		begin := time.Now()
		if _, err := c.Command(ctx, "show status"); err == nil || time.Since(begin) != 300*time.Millisecond {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
	})
}

func TestGreetings(t *testing.T) {
	for text, want := range map[string]struct{ version, problem string }{
		"0001 BIRD 2.0.12 ready.\n":       {version: "2.0.12"},
		"0001 BIRD 3.3.2 ready.\n":        {version: "3.3.2"},
		"+async\n0001 BIRD 2.19 ready.\n": {version: "2.19"},
		"0001 ready\n":                    {},
		"9000 Command too long\n":         {problem: "9000"},
		"220 mail ESMTP\n":                {problem: "has no reply code"},
		"SSH-2.0-OpenSSH_9.2\r\n":         {problem: "has no reply code"},
		"":                                {problem: "timeout"},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, err := conversation(t, text, func(net.Conn) {})
			if want.problem != "" {
				harness.WantError(t, err, want.problem)
				return
			}
			if err != nil || c.Version != want.version {
				t.Errorf("%q: %v, %+v", text, err, c)
			}
		})
	}
}

func TestHarmfulCommandsAreRefused(t *testing.T) {
	c := &Client{} // without a usable connection
	for _, command := range []string{strings.Repeat("x", maxCommand+1), "show status\ndown", "show status\r", "show\x00"} {
		if _, err := c.Command(t.Context(), command); err == nil {
			t.Errorf("%.20q was sent", command)
		}
	}
}

func TestDialReportsServerPID(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	if _, err := Dial(t.Context(), path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.Listen("unix", path)
	harness.Must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	served := make(chan struct{})
	go func() {
		defer close(served)
		if conn, err := l.Accept(); err == nil {
			_, _ = conn.Write([]byte(greeting))
			_ = conn.Close()
		}
	}()
	c, err := Dial(t.Context(), path)
	if err != nil || c.PID != os.Getpid() || c.Version != "2.0.12" {
		t.Fatalf("%+v, %v", c, err)
	}
	<-served
	if _, err := c.Command(t.Context(), "show status"); err == nil {
		t.Error("a closed connection answers")
	}
	harness.Check(t, c.Close())
}
