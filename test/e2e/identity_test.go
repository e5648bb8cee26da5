package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/identitytest"
	"github.com/vipgate/vipgate/test/lab"
)

// between signs an SVID that is valid for an interval, which may be in the past.
func (f *fixture) between(a *identity.DevAuthority, id string, from, to time.Duration) *x509svid.SVID {
	f.t.Helper()
	now := time.Now()
	svid, err := a.Mint(spiffeid.RequireFromString(id), now.Add(from), now.Add(to))
	f.must(err)
	return svid
}

// stranger returns an authority that no process in the pod trusts.
func (f *fixture) stranger() *identity.DevAuthority {
	f.t.Helper()
	a, err := identity.NewDevAuthority()
	f.must(err)
	return a
}

// The readiness socket admits TLS 1.3 with an authorized SPIFFE ID only; a refusal is logged with
// peer ID and reason (docs/architecture.md#security).
func TestLBAuthorizesPeers(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2)
	mark := f.mark()
	ours := f.authority()
	tls12 := showing(f.mint(ours, lab.FrontendID))
	tls12.MaxVersion = tls.VersionTLS12

	for _, c := range []struct {
		name  string
		creds credentials.TransportCredentials
		log   []string
	}{
		{
			"a valid SVID of another ID", credentials.NewTLS(showing(f.mint(ours, "spiffe://vipgate.demo/stranger"))),
			[]string{
				"reason=wrong_id", "peer_id=spiffe://vipgate.demo/stranger", lab.FrontendID, lab.OperatorID,
			},
		},
		{
			"a longer ID that begins with the right one",
			credentials.NewTLS(showing(f.mint(ours, lab.FrontendID+"/more"))),
			[]string{
				"reason=wrong_id", "peer_id=" + lab.FrontendID + "/more",
			},
		},
		{
			"another trust domain", credentials.NewTLS(showing(f.mint(ours, "spiffe://elsewhere.example/frontend"))),
			[]string{
				"reason=other_trust_domain", "peer_id=spiffe://elsewhere.example/frontend", "no bundle for trust domain " +
					"elsewhere.example",
			},
		},
		{
			"the right ID, signed by a stranger", credentials.NewTLS(showing(f.mint(f.stranger(), lab.FrontendID))),
			[]string{
				"reason=untrusted_authority", "peer_id=" + lab.FrontendID,
			},
		},
		{
			"an expired SVID", credentials.NewTLS(showing(f.between(ours, lab.FrontendID, -2*time.Hour, -time.Hour))),
			[]string{
				"reason=expired", "peer_id=" + lab.FrontendID, "local clock:",
			},
		},
		{
			"an SVID whose time has not come",
			credentials.NewTLS(showing(f.between(ours, lab.FrontendID, time.Hour, 2*time.Hour))),
			[]string{
				"reason=not_yet_valid", "peer_id=" + lab.FrontendID, "local clock:",
			},
		},
		{"no certificate", credentials.NewTLS(showing(nil)), []string{"reason=no_certificate"}},
		{"plaintext", insecure.NewCredentials(), []string{"reason=not_tls"}},
		{"TLS 1.2", credentials.NewTLS(tls12), []string{"reason=protocol", "unsupported versions"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := f.in(t)
			from := length(f.pod.LB)
			conn := f.client(c.creds)
			answer, err := f.ask(conn)
			if status.Code(err) != codes.Unavailable {
				t.Fatalf("the LB answered %v, error %v; want a connection that ends", answer, err)
			}
			f.waitLine(f.pod.LB, from,
				append(c.log, "client refused", fmt.Sprintf("peer_pid=%d", os.Getpid()), "peer_uid=0")...)
			conn.Close()
		})
	}
	// The same call by an authorized ID succeeds.
	if answer, err := f.ask(f.operator()); err != nil || vipCount(answer.GetGroups()) != 4 {
		t.Errorf("the operator got %v, error %v", answer, err)
	}
	f.wantSilence(mark)
}

// sessions is a client's cache of TLS sessions that counts the stored tickets.
type sessions struct {
	tls.ClientSessionCache
	tickets atomic.Int32
}

func (s *sessions) Put(key string, state *tls.ClientSessionState) {
	if state != nil {
		s.tickets.Add(1)
	}
	s.ClientSessionCache.Put(key, state)
}

// speak opens a connection, begins HTTP/2 and returns the first bytes of the server.
func speak(ctx context.Context, socket string, config *tls.Config) (tls.ConnectionState, []byte, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return tls.ConnectionState{}, nil, err
	}
	defer raw.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := raw.SetDeadline(deadline); err != nil {
			return tls.ConnectionState{}, nil, err
		}
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		return conn.ConnectionState(), nil, err
	}
	// The preface of HTTP/2 and an empty SETTINGS frame (RFC 9113 section 3.4).
	if _, err := io.WriteString(conn,
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
		return conn.ConnectionState(), nil, err
	}
	header := make([]byte, 9)
	_, err = io.ReadFull(conn, header)
	return conn.ConnectionState(), header, err
}

// A resumed session would skip the check of the SPIFFE ID
// (docs/adr/0012-spiffe-mtls-unix-socket.md).
func TestTLSSessionsAreNeverResumed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	before, after := identitytest.NewCA(t, lab.TrustDomain), identitytest.NewCA(t, lab.TrustDomain)
	svids := f.path("svids")
	lbID, operatorID := spiffeid.RequireFromString(lab.LBID), spiffeid.RequireFromString(lab.OperatorID)
	before.WriteFiles(svids, before.SVID(lbID, time.Hour))
	f.startLBAs(nil, as(f.pod.LBArgs(), "--identity=files", "--svid-dir="+svids))
	f.waitLB("Readiness", true)

	ctx := harness.Context(t, waitTimeout)
	cache := &sessions{ClientSessionCache: tls.NewLRUClientSessionCache(8)}
	config := showing(before.SVID(operatorID, time.Hour))
	config.ClientSessionCache, config.ServerName = cache, "localhost"
	for range 3 {
		// A ticket would come before the first frame (RFC 8446 section 4.6.1 allows it
		// at any time; crypto/tls sends it with the end of the handshake).
		state, frame, err := speak(ctx, f.pod.Socket(), config)
		if err != nil || frame[3] != 4 {
			t.Fatalf("the operator was not let in: first frame %x, error %v", frame, err)
		}
		if state.DidResume {
			t.Error("a session was resumed")
		}
	}
	if n := cache.tickets.Load(); n != 0 {
		t.Errorf("%d session tickets were offered", n)
	}

	// After this rotation the lb does not trust the operator's SVID.
	from := length(f.pod.LB)
	after.WriteFiles(svids, after.SVID(lbID, time.Hour))
	f.waitLine(f.pod.LB, from, "SVID rotated")
	if state, frame, err := speak(ctx, f.pod.Socket(), config); err == nil {
		t.Errorf("an SVID that is denied by now was let in, resumed: %t, first frame %x", state.DidResume, frame)
	}
	f.waitLine(f.pod.LB, from, "client refused", "reason=untrusted_authority", "peer_id="+lab.OperatorID)
	config.Certificates = showing(after.SVID(operatorID, time.Hour)).Certificates
	if _, _, err := speak(ctx, f.pod.Socket(), config); err != nil {
		t.Errorf("a new SVID of the same ID is refused: %v", err)
	}
}

// impostor serves readiness on the pod's socket: every VIP is ready, and synced. It accepts every
// client. stop ends it.
func (f *fixture) impostor(creds credentials.TransportCredentials) (stop func()) {
	f.t.Helper()
	table := readiness.NewTable(readiness.TableOptions{Lease: readiness.MaxLease})
	decision := readiness.Decision{Synced: true}
	for _, v := range every() {
		parsed, err := vip.Parse(v)
		f.must(err)
		decision.Changed = append(decision.Changed, readiness.VIPReadiness{
			VIP: parsed, State: vip.Ready, Reason: readinessv1.VipReason_VIP_REASON_TARGETS_READY, ReadyTargets: 1,
			TotalTargets: 1,
		})
	}
	table.Commit(decision)
	service := readiness.NewServer(table, readiness.ServerOptions{
		Peer: func(context.Context) (spiffeid.ID, bool) { return spiffeid.RequireFromString(lab.FrontendID), true },
		Role: func(spiffeid.ID) readiness.Role { return readiness.RoleFrontend },
	})
	server := grpc.NewServer(append(readiness.GRPCOptions(), grpc.Creds(creds))...)
	readinessv1.RegisterReadinessServiceServer(server, service)
	listener, err := net.Listen("unix", f.pod.Socket()) // its Close removes the socket
	f.must(err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	return func() {
		server.Stop()
		f.must(<-served)
	}
}

// serving is the TLS configuration of a server that presents an SVID and requests a client
// certificate without verifying it.
func serving(svid *x509svid.SVID) *tls.Config {
	c := showing(svid)
	c.ClientAuth = tls.RequireAnyClientCert
	return c
}

// The frontend checks the SPIFFE ID of the lb (docs/architecture.md#security).
func TestFrontendAuthorizesLB(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ours := f.authority()
	f.must(f.pod.StartFrontend())
	f.waitFrontend("Egress", true)
	tls12 := serving(f.mint(ours, lab.LBID))
	tls12.MaxVersion = tls.VersionTLS12

	for _, c := range []struct {
		name  string
		creds credentials.TransportCredentials
		words []string
	}{
		{
			"a valid SVID of another ID", credentials.NewTLS(serving(f.mint(ours, "spiffe://vipgate.demo/impostor"))),
			[]string{
				"spiffe://vipgate.demo/impostor", "expected " + lab.LBID,
			},
		},
		{"our own ID", credentials.NewTLS(serving(f.mint(ours, lab.FrontendID))), []string{
			"the peer is " + lab.FrontendID, "expected " + lab.LBID,
		}},
		{"another trust domain", credentials.NewTLS(serving(f.mint(ours, "spiffe://elsewhere.example/lb"))), []string{
			"spiffe://elsewhere.example/lb", "expected " + lab.LBID, "no bundle for trust domain elsewhere.example",
		}},
		{"the right ID, signed by a stranger", credentials.NewTLS(serving(f.mint(f.stranger(), lab.LBID))), []string{
			lab.LBID, "not signed by an authority of trust domain " + lab.TrustDomain,
		}},
		{"an expired SVID", credentials.NewTLS(serving(f.between(ours, lab.LBID, -2*time.Hour, -time.Hour))), []string{
			lab.LBID, "expired", "local clock:",
		}},
		{
			"plaintext", insecure.NewCredentials(), []string{
				"TLS handshake",
				"first record does not look like a TLS handshake",
			},
		},
		{"TLS 1.2", credentials.NewTLS(tls12), []string{"TLS handshake", "protocol version"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := f.in(t)
			from := length(f.pod.Frontend)
			stop := f.impostor(c.creds)
			defer stop()
			f.waitFrontend("Stream", false, c.words...)
			f.waitLine(f.pod.Frontend, from, append(c.words, "readiness connection failed")...)
		})
	}
	isDefault := func(u lab.RouteUpdate) bool { return u.Prefix.Bits() == 0 }
	if received := slices.DeleteFunc(f.trace(), isDefault); len(received) > 0 {
		t.Errorf("the gateway received %v without an authorized LB", received)
	}
	// The same impostor is accepted with the expected certificate.
	defer f.impostor(credentials.NewTLS(serving(f.mint(ours, lab.LBID))))()
	f.wantRoutes(every()...)
}

// A trust domain is the widest setting (docs/architecture.md#security).
func TestTrustDomainAuthorization(t *testing.T) {
	t.Parallel()
	a := newAttested(t)
	a.up(a.target1)
	// The LB trusts the authority of another trust domain, but authorizes none of its IDs.
	other := identitytest.NewCA(t, "elsewhere.example")
	a.lb.Offer(a.ca, []*x509svid.SVID{a.ca.SVID(a.ca.ID("/a"), time.Hour)}, other.Bundle())
	a.frontend.Offer(a.ca, []*x509svid.SVID{a.ca.SVID(a.ca.ID("/b"), time.Hour)})
	a.lb.Start()
	a.frontend.Start()
	a.start(false, "--frontend-trust-domain="+lab.TrustDomain, "--lb-trust-domain="+lab.TrustDomain)
	a.wantRoutes(vipA4, vipA6)
	for _, watcher := range a.lbStatus().GetWatchers() {
		if watcher.GetPeer() != a.ca.ID("/b").String() || !watcher.GetReporting() {
			t.Errorf("the LB has the watcher %v", watcher)
		}
	}
	from := length(a.pod.LB)
	if answer, err := a.ask(a.client(credentials.NewTLS(showing(other.SVID(other.ID("/b"),
		time.Hour))))); status.Code(err) != codes.Unavailable {
		t.Errorf("a member of another trust domain got %v, error %v", answer, err)
	}
	a.waitLine(a.pod.LB, from, "client refused", "reason=wrong_id", "peer_id="+other.ID("/b").String(),
		"expected a member of trust domain "+lab.TrustDomain)
}

// lb and frontend may share a SPIFFE ID, with a warning
// (docs/operations.md#one-service-account-two-identities).
func TestSharedIDWarning(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--spiffe-id=" + lab.FrontendID))
	f.must(f.pod.StartFrontend("--lb-id=" + lab.FrontendID))
	f.wantRoutes(vipA4, vipA6)
	for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
		f.waitLine(p, 0, "level=WARN", "lb and frontend share a SPIFFE ID", lab.FrontendID)
	}
}

// services returns the service names that reflection lists.
func services(ctx context.Context, conn *grpc.ClientConn) ([]string, error) {
	stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{
		MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{},
	}); err != nil {
		return nil, err
	}
	r, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range r.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	return names, stream.CloseSend()
}

// A --reader-id may call GetReadiness, WatchReadiness and reflection, but not ReportAdvertisement
// (docs/architecture.md#security).
func TestReaderCannotReport(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	mark := f.mark()
	ctx := harness.Context(t, waitTimeout)
	conn := f.operator()
	client := readinessv1.NewReadinessServiceClient(conn)

	if answer, err := f.ask(conn); err != nil || vipCount(answer.GetGroups()) != 4 || !answer.GetSynced() {
		t.Errorf("GetReadiness: %v, error %v", answer, err)
	}
	if names, err := services(ctx, conn); err != nil ||
		!slices.Contains(names, "vipgate.readiness.v1.ReadinessService") {
		t.Errorf("reflection lists %v, error %v", names, err)
	}
	watch, err := client.WatchReadiness(ctx, &readinessv1.WatchReadinessRequest{Reader: "operator"})
	f.must(err)
	first, err := watch.Recv()
	f.must(err)
	if first.GetWatchId() == "" || vipCount(first.GetSnapshot().GetGroups()) != 4 {
		t.Errorf("the first message of the watch is %v", first)
	}

	from := length(f.pod.LB)
	report, err := client.ReportAdvertisement(ctx)
	f.must(err)
	// The denial may arrive before the message is sent.
	if err := report.Send(&readinessv1.ReportAdvertisementRequest{WatchId: first.GetWatchId()}); err != nil &&
		err != io.EOF {
		t.Error(err)
	}
	if _, err := report.CloseAndRecv(); status.Code(err) != codes.PermissionDenied ||
		!strings.Contains(err.Error(), lab.OperatorID) {
		t.Errorf("a reader's report ended with %v, want PermissionDenied with its ID", err)
	}
	f.waitLine(f.pod.LB, from, "call denied on the readiness socket", "peer="+lab.OperatorID,
		"method=ReportAdvertisement")
	for _, watcher := range f.lbStatus().GetWatchers() {
		if want := watcher.GetPeer() == lab.FrontendID; watcher.GetReporting() != want {
			t.Errorf("watcher %v counts as the one that reports: %t, want %t", watcher, watcher.GetReporting(), want)
		}
	}
	for _, v := range f.lbStatus().GetVips() {
		if r := v.GetReported(); v.GetVip() == vipA4 &&
			r.GetAdvertisement() != readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED {
			t.Errorf("the LB believes %v of %s after a reader's report", r, vipA4)
		}
	}
	f.wantSilence(mark)
}

// Runs the commands of docs/reference.md#readiness-socket-mutual-tls.
func TestGRPCurlWithOperatorSVID(t *testing.T) {
	t.Parallel()
	tool := filepath.Join(binaries, "tools", "grpcurl")
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB())
	f.waitGet(f.operator())
	curl := func(args ...string) (string, error) {
		ctx := harness.Context(t, waitTimeout)
		var out, problem bytes.Buffer
		cmd := exec.CommandContext(ctx, tool, args...)
		cmd.Stdout, cmd.Stderr = &out, &problem
		if err := cmd.Run(); err != nil {
			return out.String(), fmt.Errorf("grpcurl %s: %w: %s", strings.Join(args, " "), err, problem.String())
		}
		return out.String(), nil
	}
	withSVID := func(id string) []string {
		dir := f.path("operator-" + filepath.Base(id))
		a := f.authority()
		f.must(a.WriteFiles(dir, f.mint(a, id)))
		return []string{
			"-insecure", "-cert", filepath.Join(dir, identity.CertFile), "-key",
			filepath.Join(dir, identity.KeyFile), "-unix", f.pod.Socket(),
		}
	}

	operator := withSVID(lab.OperatorID)
	out, err := curl(append(operator, "list")...)
	f.must(err)
	for _, service := range []string{"vipgate.readiness.v1.ReadinessService", "grpc.health.v1.Health"} {
		if !slices.Contains(strings.Fields(out), service) {
			t.Errorf("%s is not among %q", service, out)
		}
	}
	f.waitFor(func() error {
		out, err := curl(append(operator, "vipgate.readiness.v1.ReadinessService/GetReadiness")...)
		f.must(err)
		var answer struct {
			Synced bool
			Groups []struct {
				Readiness struct{ State string }
				Vips      []string
			}
		}
		f.must(json.Unmarshal([]byte(out), &answer))
		states := map[string]string{}
		for _, group := range answer.Groups {
			for _, v := range group.Vips {
				states[v] = group.Readiness.State
			}
		}
		if !answer.Synced || len(states) != 4 || states[vipA4] != "VIP_STATE_READY" ||
			states[vipB4] != "VIP_STATE_NOT_READY" {
			return fmt.Errorf("GetReadiness says %s", out)
		}
		return nil
	})
	report := slices.Concat([]string{"-d", "{}"}, operator,
		[]string{"vipgate.readiness.v1.ReadinessService/ReportAdvertisement"})
	if out, err := curl(report...); err == nil || !strings.Contains(err.Error(), "PermissionDenied") {
		t.Errorf("a report by the operator gave %q, error %v", out, err)
	}
	if out, err := curl(append(withSVID("spiffe://vipgate.demo/stranger"), "list")...); err == nil {
		t.Errorf("a stranger got %q", out)
	}
	out, err = curl("-plaintext", "-unix", f.pod.LBAdmin(), lbv1.LBService_GetStatus_FullMethodName[1:])
	f.must(err)
	if !strings.Contains(out, `"trench": "trench-a"`) {
		t.Errorf("the admin socket says %s", out)
	}
}
