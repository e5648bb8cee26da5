package main

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/registrytest"
)

// command runs a command that prints to out.
func command(t *testing.T, out *harness.Log, args ...string) error {
	t.Helper()
	parsed, err := parser(t).Parse(args)
	if err != nil {
		return err
	}
	parsed.BindTo(context.Background(), (*context.Context)(nil))
	return parsed.Run(&cli.Output{Writer: out})
}

func TestAddRegistersEverywhere(t *testing.T) {
	ca, dir := identitytest.NewCA(t, "example.org"), identitytest.ShortDir(t)
	svid, add := filepath.Join(dir, "svid"), filepath.Join(dir, "add.sock")
	ca.WriteFiles(svid, ca.SVID(ca.ID("/app"), time.Hour))
	tcp, unix := registrytest.New(t, ca, 50*time.Millisecond), registrytest.New(t, ca, 50*time.Millisecond)
	at, _ := tcp.Serve("tcp", "127.0.0.1:0", false)
	socket, _ := unix.Serve("unix", filepath.Join(dir, "lb.sock"), false)
	var out harness.Log
	ended := make(chan error, 1)
	go func() {
		ended <- command(t, &out, "add", "a", "--stream=s", "--ip=10.0.0.1", "--ip=fd00::1", "--registry="+at,
			"--registry=unix://"+socket, "--lb-id=spiffe://example.org/lb", "--identity=files", "--svid-dir="+svid,
			"--admin-socket=unix://"+add, "--grace=3s")
	}()
	var status *harness.Log
	await.True(t, "the target being ready at both", func() bool {
		status = &harness.Log{}
		// While a registration is not in force the exit status is 1.
		return command(t, status, "status", "--admin-socket="+filepath.Join(dir, "admin.sock")) == nil &&
			strings.Count(status.String(), "READY") == 2
	})
	harness.WantText(t, status.String(), at, "unix://"+socket, "10.0.0.1,fd00::1")
	harness.Must(t, syscall.Kill(syscall.Getpid(), syscall.SIGTERM))
	harness.Check(t, await.Receive(t, "the end of the command", ended))
	for _, lb := range []string{at, "unix://" + socket} {
		for _, line := range []string{
			"registered at the load balancer; without this process the target stays for 3s", "s/a 10.0.0.1: ready",
			"deregistering", "s/a fd00::1: gone",
		} {
			if !strings.Contains(out.String(), lb+": "+line+"\n") {
				t.Errorf("printed\n%s\nwant %s: %s", out.String(), lb, line)
			}
		}
	}
	await.True(t, "the end of the target", func() bool { return len(tcp.States())+len(unix.States()) == 0 })
}

func TestAddRefusesFlags(t *testing.T) {
	valid := []string{"add", "a", "--stream=s", "--ip=10.0.0.1", "--registry=lb.test:1", "--lb-id=spiffe://a/b"}
	dev := []string{"--identity=dev", "--dev-authority-dir=" + t.TempDir()}
	for want, args := range map[string][]string{
		"--registry=here: write unix:///PATH, or HOST:PORT": append(dev, "--registry=here"),
		"are of one family":            append(dev, "--ip=10.0.0.2"),
		"no identity: set --identity=": nil,
		"is not a unix socket":         append(dev, "--admin-socket=tcp://here"),
		"must not be negative":         append(dev, "--grace=-1s"),
	} {
		err := command(t, &harness.Log{}, append(valid, args...)...)
		var refused *cli.UsageError
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
	for _, missing := range []string{"--registry", "--lb-id", "--stream", "--ip"} {
		var args []string
		for _, a := range valid {
			if !strings.HasPrefix(a, missing+"=") {
				args = append(args, a)
			}
		}
		harness.WantError(t, command(t, &harness.Log{}, args...), missing)
	}
}
