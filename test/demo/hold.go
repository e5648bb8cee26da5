package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// svidTTL is the lifetime of minted SVIDs: longer than a demo runs.
	svidTTL = 24 * time.Hour
	// restartAfter is the delay before an ended container is restarted, as with Kubernetes.
	restartAfter = 2 * time.Second
)

// exampleCommand is a command for another terminal.
type exampleCommand struct {
	what    string
	command string
}

// hold leaves everything running until the next signal, and prints commands to try. It reports
// whether the pod is as it was after the last step, so that the pod can be stopped.
func (t *scenario) hold(signals <-chan os.Signal) (complete bool, err error) {
	operator, err := t.mint(lab.OperatorID)
	if err != nil {
		return false, err
	}
	t.expectExit()
	t.printf("\nEverything runs on. Try in another terminal, as root:")
	for _, c := range t.commands(operator) {
		t.printf("\n# %s\n%s", c.what, c.command)
	}
	t.printf("\nAn lb or frontend that ends is started again after %v, as Kubernetes does.", restartAfter)
	t.printf("Ctrl-C ends the pod in order and clears everything up.")
	if t.err != nil {
		return false, t.err
	}
	for {
		select {
		case <-signals:
			return t.podUnchanged()
		case <-t.pod.LB.Done():
			err = t.restart(signals, t.pod.LB, t.startLB)
		case <-t.pod.Frontend.Done():
			err = t.restart(signals, t.pod.Frontend, t.startFrontend)
		}
		if errors.Is(err, errSignalled) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
}

// errSignalled reports that a signal came while the pod was not complete.
var errSignalled = errors.New("signalled")

// restart starts a container of the pod again.
func (t *scenario) restart(signals <-chan os.Signal, p *lab.Process, start func() error) error {
	t.printf("-- %s (pid %d) ended", p.Name, p.PID())
	timer := time.NewTimer(restartAfter)
	defer timer.Stop()
	select {
	case <-signals:
		return errSignalled
	case <-timer.C:
	}
	if err := start(); err != nil {
		return err
	}
	t.printf("-- %s runs again", p.Name)
	return nil
}

// podUnchanged reports whether the gateway's routes are the same as after the last step; an
// operator may have changed them.
func (t *scenario) podUnchanged() (bool, error) {
	now, err := t.watcher.Now()
	if err != nil {
		return false, err
	}
	if err := exactly(t.vips())(now); err != nil {
		t.printf("\nThe last step is left out: %v.", err)
		return false, nil
	}
	return true, nil
}

// mint signs an SVID for a user or an application and returns its folder.
func (s *fixture) mint(who string) (string, error) {
	authority, err := identity.OpenDevAuthority(context.Background(), s.pod.Authority())
	if err != nil {
		return "", err
	}
	id, err := spiffeid.FromString(who)
	if err != nil {
		return "", fmt.Errorf("SPIFFE ID %s: %w", who, err)
	}
	svid, err := authority.MintFor(id, svidTTL)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(s.lab.Dir, "svid-"+path.Base(who))
	return dir, authority.WriteFiles(dir, svid)
}

// commands returns the commands to try, in an order in which each finds its prerequisites.
func (t *scenario) commands(operator string) []exampleCommand {
	birdc := quote(filepath.Join(filepath.Dir(lab.BIRD()), "birdc"))
	frontend, lbProgram := quote(filepath.Join(t.binaries, "frontend")), quote(filepath.Join(t.binaries, "lb"))
	grpcurl := quote(filepath.Join(t.tools, "grpcurl"))
	frontendAdmin, lbAdmin := t.pod.FrontendAdmin(), t.pod.LBAdmin()
	inPod := "ip netns exec " + t.lab.Pod.Name() + " "
	// grpcurl verifies host names, which an SVID does not have, so -insecure skips the check; the
	// lb verifies the client's SVID.
	asOperator := fmt.Sprintf("%s -insecure -cert %s/tls.crt -key %s/tls.key", grpcurl, operator, operator)
	app := filepath.Join(t.lab.Dir, "svid-"+path.Base(lab.AppID)) // created in an earlier step
	target, other := t.one.vips[0], t.two.vips[0]

	var list []exampleCommand
	add := func(what, format string, args ...any) {
		list = append(list, exampleCommand{what, fmt.Sprintf(format, args...)})
	}
	add("every VIP: advertised or not, and why (until Ctrl-C)",
		"%s status --admin-socket=unix://%s --watch", frontend, frontendAdmin)
	add("what happened so far, and the causes", "%s events --admin-socket=unix://%s", frontend, frontendAdmin)
	add("streams, targets, and what the frontend reports", "%s status --admin-socket=unix://%s", lbProgram, lbAdmin)
	add("the gateway's table, out of its BIRD",
		"%s -r -s %s 'show route all where source = RTS_BGP'", birdc, t.gateway.Socket())
	add("the pod's BIRD: its sessions", "%s -r -s %s show protocols", birdc, t.pod.BirdSocket())
	add("metrics of the frontend", "%scurl -s http://%s/metrics | grep ^vipgate", inPod, lab.FrontendMetrics)
	add("metrics of the lb", "%scurl -s http://%s/metrics | grep ^vipgate", inPod, lab.LBMetrics)
	add("mutual TLS as the operator: what the lb says about every VIP",
		"%s unix://%s vipgate.readiness.v1.ReadinessService/GetReadiness", asOperator, t.pod.Socket())
	add("the same as the lease that the frontend lives by (until Ctrl-C)",
		"%s unix://%s vipgate.readiness.v1.ReadinessService/WatchReadiness", asOperator, t.pod.Socket())
	add("refused: an operator reads, it does not report",
		"%s -d '{}' unix://%s vipgate.readiness.v1.ReadinessService/ReportAdvertisement", asOperator, t.pod.Socket())
	add("refused: a client without an SVID",
		"%s -insecure unix://%s vipgate.readiness.v1.ReadinessService/GetReadiness", grpcurl, t.pod.Socket())
	add("admin socket of the frontend: status",
		"%s -plaintext unix://%s vipgate.frontend.v1.FrontendService/GetStatus", grpcurl, frontendAdmin)
	add("admin socket of the lb: status", "%s -plaintext unix://%s vipgate.lb.v1.LBService/GetStatus", grpcurl, lbAdmin)
	add("health of one VIP",
		`%s -plaintext -d '{"service":"vip/%s"}' unix://%s grpc.health.v1.Health/Check`, grpcurl, target, frontendAdmin)
	add("health at the port that Kubernetes asks", "%s%s healthcheck --service=Egress", inPod, frontend)
	add(fmt.Sprintf("move traffic of %s away: 65535:0, then the withdrawal", other),
		"%s drain --force --admin-socket=unix://%s %s", frontend, frontendAdmin, other)
	add("and take it back", "%s undrain --admin-socket=unix://%s %s", frontend, frontendAdmin, other)
	add("the application's target registers again, as long as this runs (until Ctrl-C)",
		"%s -insecure -cert %s/tls.crt -key %s/tls.key -d '%s' unix://%s vipgate.target.v1.TargetService/Register", grpcurl,
		app, app, t.registration(), t.pod.Socket())
	add("every target, from whatever source", "%s target list --admin-socket=unix://%s", lbProgram, lbAdmin)
	add(fmt.Sprintf("no new flows for %s: its VIPs are de-preferred, then withdrawn", t.two.name),
		"%s target drain --admin-socket=unix://%s %s", lbProgram, lbAdmin, t.two.name)
	add("and take it back", "%s target undrain --admin-socket=unix://%s %s", lbProgram, lbAdmin, t.two.name)
	// Not target 1, which has the first address of the subnet: with it the kernel would remove the
	// other addresses of the subnet.
	add(fmt.Sprintf("%s loses its IPv4 address: %s goes, %s stays", t.two.name, other, t.two.vips[1]),
		"ip -n %s addr del %s/16 dev pod0", t.lab.Backend.Name(), t.two.addrs[0])
	add("and gets it back", "ip -n %s addr add %s/16 dev pod0", t.lab.Backend.Name(), t.two.addrs[0])
	add("pull the gateway's cable", "ip -n %s link set trench0 down", t.lab.Gateway.Name())
	add("and plug it in (its IPv6 address went with the link)",
		"ip -n %[1]s link set trench0 up && ip -n %[1]s addr replace %[2]s/64 dev trench0 nodad", t.lab.Gateway.Name(),
		lab.GatewayA6)
	add("kill the load balancer", "kill -9 $(cat %s)", t.pidFile("lb"))
	add("kill the frontend; its BIRD withdraws by itself", "kill -9 $(cat %s)", t.pidFile("frontend"))
	if _, err := exec.LookPath("curl"); err != nil {
		list = slices.DeleteFunc(list, func(c exampleCommand) bool { return strings.Contains(c.command, "curl -s") })
		list = append(list, exampleCommand{"the metrics need this once", "apt-get install -y curl"})
	}
	return list
}

// quote makes a word of the shell out of a path.
func quote(s string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-"
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
