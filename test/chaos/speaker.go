package main

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/vipgate/vipgate/test/lab"
)

// The session between the frontend and the FRR of the pod, which runs as on a host.
var (
	speakerAddr = netip.AddrPortFrom(netip.MustParseAddr("10.77.0.1"), lab.BGPPort)
	announcer   = netip.MustParseAddr("10.77.0.2")
)

// speakerDir is the name of the folder of the pod's FRR.
const speakerDir = "speaker"

// speakerArgs returns the flags of the session, of frontend run and of frontend speaker-config.
func speakerArgs() []string {
	return []string{
		"--speaker-address=" + speakerAddr.String(), "--speaker-local=" + announcer.String(),
		fmt.Sprintf("--speaker-as=%d", lab.PodAS), "--speaker-next-hop=fd00:77::2",
		"--speaker-password-file=none",
	}
}

// speakerFlags returns the flags of frontend run that depend on the speaker.
func (fx *fixture) speakerFlags() []string {
	if !fx.external {
		return []string{"--bird-socket=" + fx.pod.BirdSocket(), "--ecmp", "--import-routes=all"}
	}
	return append(speakerArgs(), "--speaker=external",
		"--speaker-socket="+filepath.Join(fx.Dir, speakerDir, "bgpd.vty"))
}

// startSpeaker starts the pod's FRR with the configuration that speaker-config prints. As in the
// mode with BIRD, it also accepts routes to the clients, and uses the default routes of both
// gateways.
func (fx *fixture) startSpeaker() error {
	if !fx.external {
		return nil
	}
	if err := fx.Pod.Addr("lo", speakerAddr.Addr().String()+"/29", "fd00:77::1/126"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	config, err := fx.pod.Run(ctx, "frontend", append([]string{
		"speaker-config", "frr", "--trench-file=" + fx.pod.TrenchFile(),
	}, speakerArgs()...)...)
	if err != nil {
		return err
	}
	lines := []string{fmt.Sprintf("! bgpd_options=\"-p %d\"", lab.BGPPort), config}
	for g := range gateways {
		for f := range families {
			lines = append(lines, fmt.Sprintf("%s prefix-list VIPGATE-ROUTES%d seq %d permit %s/%d", []string{"ip", "ipv6"}[f],
				4+2*f, 20+g, clientAddr(g, f), clientAddr(g, f).BitLen()))
		}
	}
	lines = append(lines, fmt.Sprintf("router bgp %d", lab.PodAS), " bgp bestpath as-path multipath-relax", "exit\n")
	started, err := fx.StartRouter(lab.KindFRR, fx.Pod, lab.GatewayConfig{
		Name: speakerDir, BFD: true, Text: strings.Join(lines, "\n"),
	})
	if err != nil {
		return err
	}
	fx.speaker = &router{Router: started, names: frrNames, live: started.Processes()}
	return nil
}

// speakerHelpers returns zebra and bfdd of the pod's FRR.
func (fx *fixture) speakerHelpers() []*lab.Process {
	if !fx.external {
		return nil
	}
	return fx.speaker.processes()[:2]
}
