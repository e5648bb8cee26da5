package rtnetlink

import (
	"context"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a shell command in a namespace.
func run(t testing.TB, ns *lab.NetNS, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := ns.Run(ctx, "sh", "-ec", command)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return out
}
