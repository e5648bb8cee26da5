package main

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// echoes serves lines back on a unix socket, until the test ends.
func echoes(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(conn, conn) // ends with the other side
			conn.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

// through returns a proxy before an echo server, and a function that connects to it.
func through(t *testing.T) (*proxy, func() *net.UnixConn) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	echoes(t, filepath.Join(dir, "echo"))
	p, err := newProxy(filepath.Join(dir, "proxy"), filepath.Join(dir, "echo"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p, func() *net.UnixConn {
		t.Helper()
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: p.path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
}

// wantEcho fails unless a line comes back.
func wantEcho(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.WriteString(conn, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != "hello\n" {
		t.Fatalf("%q came back, error %v", line, err)
	}
}

// wantEnd fails unless the other side ends.
func wantEnd(t *testing.T, conn net.Conn) {
	t.Helper()
	if n, err := conn.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%d bytes, error %v; want an end", n, err)
	}
}

func TestProxyForwards(t *testing.T) {
	for name, end := range map[string]func(*proxy){
		"reset":                           (*proxy).reset,
		"half-closed toward the frontend": func(p *proxy) { p.halfClose(true) },
		"half-closed toward the lb":       func(p *proxy) { p.halfClose(false) },
		"refused":                         func(p *proxy) { p.refuse(true) },
	} {
		t.Run(name, func(t *testing.T) {
			p, dial := through(t)
			conn := dial()
			wantEcho(t, conn)
			end(p)
			wantEnd(t, conn)
			conn.Close()
			if name == "refused" {
				if c, err := net.Dial("unix", p.path); err == nil {
					c.Close()
					t.Error("a connection was taken")
				}
				p.refuse(false)
			}
			wantEcho(t, dial())
		})
	}
}

func TestProxyStall(t *testing.T) {
	p, dial := through(t)
	conn := dial()
	wantEcho(t, conn)
	p.stall(true)
	if _, err := io.WriteString(conn, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("something came through: %v", err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	p.stall(false)
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != "hello\n" {
		t.Fatalf("%q came back, error %v", line, err)
	}
	begin := time.Now()
	p.delay(30 * time.Millisecond)
	wantEcho(t, conn)
	if took := time.Since(begin); took < 60*time.Millisecond {
		t.Errorf("there and back took %s, with 30 ms each way", took)
	}
	if n := p.olderThan(time.Now()); n != 1 {
		t.Errorf("%d connections", n)
	}
}
