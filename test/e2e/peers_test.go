package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// in returns the same fixture for a subtest, so that failures are attributed to the subtest.
func (f *fixture) in(t *testing.T) *fixture {
	c := *f
	c.t = t
	return &c
}

// authority is the pod's development authority, which lb and frontend share.
func (f *fixture) authority() *identity.DevAuthority {
	f.t.Helper()
	a, err := identity.OpenDevAuthority(f.t.Context(), f.pod.Authority())
	f.must(err)
	return a
}

// mint signs an SVID that is valid from now for an hour.
func (f *fixture) mint(a *identity.DevAuthority, id string) *x509svid.SVID {
	f.t.Helper()
	svid, err := a.MintFor(spiffeid.RequireFromString(id), time.Hour)
	f.must(err)
	return svid
}

// showing is the TLS configuration of a peer that presents svid, or no certificate if svid is nil,
// and accepts every certificate: only the product refuses a connection. It shares no code with the
// product.
func showing(svid *x509svid.SVID) *tls.Config {
	c := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	if svid != nil {
		shown := tls.Certificate{PrivateKey: svid.PrivateKey}
		for _, cert := range svid.Certificates {
			shown.Certificate = append(shown.Certificate, cert.Raw)
		}
		c.Certificates = []tls.Certificate{shown}
	}
	return c
}

// client connects to the readiness socket.
func (f *fixture) client(creds credentials.TransportCredentials) *grpc.ClientConn {
	f.t.Helper()
	conn, err := grpc.NewClient("unix:"+f.pod.Socket(), grpc.WithTransportCredentials(creds))
	f.must(err)
	f.t.Cleanup(func() { conn.Close() })
	return conn
}

// operator connects to the readiness socket as the reader.
func (f *fixture) operator() *grpc.ClientConn {
	f.t.Helper()
	return f.client(credentials.NewTLS(showing(f.mint(f.authority(), lab.OperatorID))))
}

// ask calls GetReadiness once.
func (f *fixture) ask(conn *grpc.ClientConn) (*readinessv1.GetReadinessResponse, error) {
	ctx := harness.Context(f.t, waitTimeout)
	return readinessv1.NewReadinessServiceClient(conn).GetReadiness(ctx, &readinessv1.GetReadinessRequest{})
}

// vipCount returns the number of VIPs in all groups.
func vipCount(groups []*readinessv1.ReadinessGroup) (count int) {
	for _, group := range groups {
		count += len(group.GetVips())
	}
	return count
}

// waitGet waits until the LB answers GetReadiness: it may be starting.
func (f *fixture) waitGet(conn *grpc.ClientConn) *readinessv1.GetReadinessResponse {
	f.t.Helper()
	var answer *readinessv1.GetReadinessResponse
	f.waitFor(func() (err error) {
		answer, err = f.ask(conn)
		return err
	})
	return answer
}

// length returns the length of a process's output, a position for lines.
func length(p *lab.Process) int { return len(p.Output()) }

// lines returns the lines with all words that a process logged after from.
func lines(p *lab.Process, from int, words ...string) []string {
	var found []string
	for line := range strings.Lines(p.Output()[from:]) {
		if hasAll(line, words) {
			found = append(found, line)
		}
	}
	return found
}

func hasAll(text string, words []string) bool {
	return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
}

// waitLine waits until a process has logged a line with all words after from, and returns it.
func (f *fixture) waitLine(p *lab.Process, from int, words ...string) string {
	f.t.Helper()
	return f.waitLinesN(p, from, 1, words...)[0]
}

// waitLinesN waits until a process has logged n lines with all words after from, and returns them.
func (f *fixture) waitLinesN(p *lab.Process, from, n int, words ...string) []string {
	f.t.Helper()
	var found []string
	f.waitFor(func() error {
		if found = lines(p, from, words...); len(found) < n {
			return fmt.Errorf("%s has printed %d lines with all of %q, want %d", p.Name, len(found), words, n)
		}
		return nil
	})
	return found
}

// condition is the state of one part of a process.
type condition interface {
	GetName() string
	GetServing() bool
	GetDetail() string
}

// waitCondition waits until a condition has the state serving and a reason with all words, and
// returns the reason.
func waitCondition[C condition](f *fixture, status func(context.Context) ([]C, error), name string, serving bool,
	words ...string,
) string {
	f.t.Helper()
	var detail string
	f.waitFor(func() error {
		conditions, err := status(f.t.Context())
		if err != nil {
			return err
		}
		for _, c := range conditions {
			if c.GetName() != name {
				continue
			}
			if c.GetServing() != serving || !hasAll(c.GetDetail(), words) {
				return fmt.Errorf(
					"%s serves: %t (%q), want %t for a reason with %q", name, c.GetServing(), c.GetDetail(), serving, words,
				)
			}
			detail = c.GetDetail()
			return nil
		}
		return fmt.Errorf("there is no condition %s", name)
	})
	return detail
}

// waitFrontend waits for a condition of the frontend.
func (f *fixture) waitFrontend(name string, serving bool, words ...string) string {
	f.t.Helper()
	client := frontendv1.NewFrontendServiceClient(f.dial(f.pod.FrontendAdmin()))
	return waitCondition(f, func(ctx context.Context) ([]*adminv1.Condition, error) {
		r, err := client.GetStatus(ctx, &adminv1.GetStatusRequest{})
		return r.GetConditions(), err
	}, name, serving, words...)
}

// waitLB waits for a condition of the LB.
func (f *fixture) waitLB(name string, serving bool, words ...string) string {
	f.t.Helper()
	client := lbv1.NewLBServiceClient(f.dial(f.pod.LBAdmin()))
	return waitCondition(f, func(ctx context.Context) ([]*adminv1.Condition, error) {
		r, err := client.GetStatus(ctx, &adminv1.GetStatusRequest{})
		return r.GetConditions(), err
	}, name, serving, words...)
}

// asUser runs fn on a thread of another user, without privileges.
func asUser(uid, gid int, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		// Raw system calls change the credentials of this thread only. It stays locked, so that
		// the runtime terminates it with this goroutine.
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
			done <- os.NewSyscallError("setgroups", errno)
			return
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)); errno != 0 {
			done <- os.NewSyscallError("setresgid", errno)
			return
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			done <- os.NewSyscallError("setresuid", errno)
			return
		}
		done <- fn()
	}()
	return <-done
}

// as replaces the identity flags of a pod's arguments with instead.
func as(args []string, instead ...string) []string {
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		return slices.ContainsFunc([]string{"--identity=", "--dev-authority-dir=", "--spiffe-id="},
			func(flag string) bool { return strings.HasPrefix(a, flag) })
	})
	return append(args, instead...)
}

// startLBAs starts the lb with the given arguments and environment.
func (f *fixture) startLBAs(env, args []string) {
	f.t.Helper()
	p, err := f.Start(f.Pod, "lb", slices.Concat([]string{"/usr/bin/env"}, env, args)...)
	f.must(err)
	f.pod.LB = p
}

// startFrontendAs starts the frontend with the given arguments and environment.
func (f *fixture) startFrontendAs(env, args []string) {
	f.t.Helper()
	p, err := f.Start(f.Pod, "frontend", slices.Concat([]string{"/usr/bin/env"}, env, args)...)
	f.must(err)
	f.pod.Frontend = p
}

// every returns all usual VIPs.
func every() []string { return []string{vipA4, vipA6, vipB4, vipB6} }

// wantSilence fails if the gateway received an update of any VIP after mark.
func (f *fixture) wantSilence(mark int) {
	f.t.Helper()
	f.wantNoUpdates(mark, every()...)
}

// path returns the path of a file in the lab's directory.
func (f *fixture) path(name string) string { return filepath.Join(f.Dir, name) }
