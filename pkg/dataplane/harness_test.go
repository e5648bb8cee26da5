package dataplane

import (
	"context"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/test/lab"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openConn opens a kernel connection in a namespace.
func openConn(t testing.TB, ns *lab.NetNS, c fwstate.Config) *fwstate.Conn {
	t.Helper()
	var conn *fwstate.Conn
	must(t, ns.Do(func() (err error) {
		conn, err = fwstate.Dial(c)
		return err
	}))
	t.Cleanup(func() { must(t, conn.Close()) })
	return conn
}

// run runs a shell command in a namespace.
func run(t testing.TB, ns *lab.NetNS, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := ns.Run(ctx, "sh", "-c", command)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return out
}
