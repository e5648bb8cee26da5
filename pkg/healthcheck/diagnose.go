package healthcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxDiagnoses is the maximum number of concurrent diagnoses, and of waiting ones. Beyond it, the
	// next failure of the target starts a diagnosis.
	maxDiagnoses = 8
	// diagnosisRest is the pause of a worker after a diagnosis: 400 a second are the most.
	diagnosisRest = 20 * time.Millisecond
	// diagnoseEvery is the time between two diagnoses of one target.
	diagnoseEvery = 10 * time.Second
	// sidecarPort is the port on which the program target serves grpc.health.v1, at the target's own
	// address: a service is an address of a VIP, and is NOT_FOUND if no pool contains the VIP.
	sidecarPort = 7783
)

// diagnosis is why checks through a VIP get no answer, until the next VIP is checked.
type diagnosis struct {
	text    string // "" before the first
	at      time.Time
	running bool
}

// examine applies the outcome of a check through a VIP: it selects the next VIP, and starts the
// diagnosis of a failure without an answer. A VIP is checked until it passes, so a target that
// lacks one VIP becomes not ready.
func (checker *Checker) examine(probe probe, outcome outcome, now time.Time) outcome {
	entry := probe.entry
	switch {
	case outcome.verdict == succeeded:
		entry.vip++
		entry.diagnosis = diagnosis{}
		return outcome
	case outcome.verdict != failed || probe.fwmark == 0:
		return outcome
	case checker.LocalVIP != nil && checker.LocalVIP(probe.to) != "":
		entry.diagnosis = diagnosis{}
		outcome.reason = checker.LocalVIP(probe.to)
		return outcome
	// A refusal needs no diagnosis: the packets reached the target and returned.
	case outcome.refused:
		entry.diagnosis = diagnosis{}
		outcome.reason = fmt.Sprintf("%s: the application does not listen on %s", outcome.reason, probe.to)
		return outcome
	case !outcome.silent:
		entry.diagnosis = diagnosis{}
		outcome.reason = fmt.Sprintf("%s %s", probe.to, outcome.reason)
		return outcome
	}
	outcome.reason = fmt.Sprintf("%s %s", probe.to, outcome.reason)
	diagnosis := &entry.diagnosis
	if !diagnosis.running && now.Sub(diagnosis.at) >= diagnoseEvery {
		// Never wait for a worker: the caller holds the mutex of the checker.
		select {
		case checker.diagnoses <- probe:
			diagnosis.running = true
		default:
		}
	}
	if diagnosis.text != "" {
		outcome.reason = diagnosis.text
	}
	return outcome
}

// diagnose diagnoses failures until ctx ends.
func (checker *Checker) diagnose(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case probe := <-checker.diagnoses:
			text := probe.diagnose(ctx)
			if ctx.Err() != nil {
				return
			}
			checker.diagnosed(probe, diagnosis{text: text, at: time.Now()})
		}
		select {
		case <-ctx.Done():
		case <-time.After(diagnosisRest):
		}
	}
}

// diagnosed applies a diagnosis unless the target has passed a check since it started.
func (checker *Checker) diagnosed(probe probe, d diagnosis) {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	entry := probe.entry
	if entry.removed || !entry.diagnosis.running {
		return
	}
	entry.diagnosis = d
	entry.LastError = d.text
	checker.dirty[entry.Key] = struct{}{}
	latest.Wake(checker.changed)
}

// diagnose finds the failing part of the path to a VIP: the target, its VIP, or its replies.
func (p probe) diagnose(ctx context.Context) string {
	own := path{to: p.entry.Addr, source: p.plan.Source(vip.FamilyOf(p.entry.Addr))}
	if !p.answers(ctx, own) {
		return fmt.Sprintf("%s port %d: no answer, and none at %s either", p.to, p.plan.port, own.to)
	}
	if p.plan.network != "tcp" && p.answers(ctx, p.path) {
		return fmt.Sprintf("%s port %d: no answer, although the target accepts packets to it; does the application hang, "+
			"or does a firewall drop them?", p.to, p.plan.port)
	}
	// The target reaches this address without a route, so only a missing VIP can prevent an answer.
	near := p.path
	near.source, _ = rtnetlink.SourceToward(own.to)
	if near.source.IsValid() && near.source != p.source && p.answers(ctx, near) {
		return fmt.Sprintf("the target accepts %s, but its replies to other networks do not return; "+
			"is \"target run\" running there?", p.to)
	}
	return p.askSidecar(ctx, own)
}

// answers reports whether a connection is accepted, or refused. Toward a check over datagrams, too:
// a host answers TCP even if its application hangs.
func (p probe) answers(ctx context.Context, path path) bool {
	ctx, cancel := context.WithTimeout(ctx, p.plan.Timeout)
	defer cancel()
	conn, err := connect(ctx, path, p.plan.port)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	_ = conn.Close() // a reset
	return true
}

// connect opens a connection that Close resets.
func connect(ctx context.Context, t path, port uint16) (net.Conn, error) {
	conn, err := t.dial(ctx, "tcp", netip.AddrPortFrom(t.to, port).String())
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	return conn, err
}

// askSidecar queries the health of the VIP at the program target, and returns the reason why the
// target does not accept the VIP.
func (p probe) askSidecar(ctx context.Context, own path) string {
	ctx, cancel := context.WithTimeout(ctx, p.plan.Timeout)
	defer cancel()
	failure := fmt.Sprintf("the target does not accept packets to %s: ", p.to)
	conn, err := connect(ctx, own, sidecarPort)
	if err != nil {
		return failure + "no \"target run\" runs there"
	}
	defer conn.Close()
	answer, s, _ := askHealth(ctx, conn, netip.AddrPortFrom(own.to, sidecarPort), p.to.String(), "")
	switch {
	case s.Code() == codes.NotFound:
		return failure + "it is not in the --pool of \"target run\" there"
	case s.Code() != codes.OK:
		return failure + "\"target run\" does not answer there"
	case answer != healthv1.HealthCheckResponse_SERVING:
		return failure + "the kernel state of \"target run\" is incomplete there; see \"target status\""
	}
	return fmt.Sprintf("no answer from %s although \"target run\" accepts it there; is a firewall in between?", p.to)
}
