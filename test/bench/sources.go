package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/lab"
)

const registrationGoal = "median ≤ 10"

// sourcesTrench returns a trench file with one stream for each VIP, whose targets, or whose
// readiness, come from another source.
func (fx *fixture) sourcesTrench() string {
	var b strings.Builder
	b.WriteString(fx.attractor())
	b.WriteString("streams:\n")
	for i, v := range fx.vips {
		fmt.Fprintf(&b, "  - {name: %s, vips: [%q], check: {tcp: {port: %d}}}\n", streamName(i), v, checkPort)
	}
	return b.String()
}

func streamName(i int) string { return fmt.Sprintf("stream-%d", i) }

// startSourcesPod starts a pod whose lb has these flags, and waits for the gateway.
func (fx *fixture) startSourcesPod(flags ...string) error {
	if err := fx.pod.WriteTrench(fx.sourcesTrench()); err != nil {
		return err
	}
	if err := fx.pod.StartLB(flags...); err != nil {
		return err
	}
	fx.guard(fx.pod.LB)
	if err := fx.startFrontend(); err != nil {
		return err
	}
	if _, err := fx.waitEstablished(); err != nil {
		return err
	}
	return fx.pause(time.Second) // until the activity of the start is over
}

// measureRegistrations is row 15: a caller with its connection registers a target,
// which is checked rise times (2, the default) before it is ready.
func measureRegistrations(ctx context.Context, s *session) error {
	n := s.sizes([]int{1000}, []int{50})[0]
	return on(ctx, s, n, oneFamily, func(fx *fixture) error {
		if err := fx.startTarget(); err != nil {
			return err
		}
		if err := fx.startSourcesPod("--source=registry", "--target-id="+lab.AppID, "--registry-settle=0s",
			"--target-quota=1000"); err != nil {
			return err
		}
		conn, err := fx.dialRegistry()
		if err != nil {
			return err
		}
		defer conn.Close()
		client := targetv1.NewTargetServiceClient(conn)
		m := Measurement{
			Row: 15, What: "Register (mTLS) → UPDATE", Method: vipgate, N: n, Unit: "ms",
			Goal: registrationGoal,
		}
		calls, end := context.WithCancel(fx.ctx)
		defer end()
		for i := range s.repeats(200, 5) {
			if err := fx.pause(between()); err != nil {
				return err
			}
			mark, start := fx.receiver.Mark(), time.Now()
			// The call is the lease: it runs until the end of the row.
			if _, err := client.Register(calls, &targetv1.RegisterRequest{
				Stream: streamName(i), Targets: []*targetv1.Target{{
					Name:      "app",
					Addresses: []string{lab.Target1v4.String()},
				}},
			}); err != nil {
				return fmt.Errorf("register: %w", err)
			}
			at, err := fx.waitState(mark, fx.vips[i], true)
			if err != nil {
				return err
			}
			m.Samples = append(m.Samples, milliseconds(at.Sub(start)))
		}
		s.record(m)
		return nil
	})
}

// dialRegistry connects to the lb's socket as the application.
func (fx *fixture) dialRegistry() (*grpc.ClientConn, error) {
	authority, err := identity.OpenDevAuthority(context.Background(), fx.pod.Authority())
	if err != nil {
		return nil, err
	}
	svid, err := authority.MintFor(spiffeid.RequireFromString(lab.AppID), time.Hour)
	if err != nil {
		return nil, err
	}
	shown := tls.Certificate{PrivateKey: svid.PrivateKey, Leaf: svid.Certificates[0]}
	for _, c := range svid.Certificates {
		shown.Certificate = append(shown.Certificate, c.Raw)
	}
	// The lb authorizes this client; the benchmark need not authorize the lb.
	creds := credentials.NewTLS(
		&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{shown}, InsecureSkipVerify: true},
	)
	conn, err := grpc.NewClient("unix:"+fx.pod.Socket(), grpc.WithTransportCredentials(creds))
	if err != nil {
		return nil, err
	}
	ctx, cancel := fx.withTimeout()
	defer cancel()
	// The handshake is over when this has been answered.
	if _, err := targetv1.NewTargetServiceClient(conn).List(ctx, &targetv1.ListRequest{},
		grpc.WaitForReady(true)); err != nil {
		return nil, fmt.Errorf("list targets: %w", err)
	}
	return conn, nil
}
