package main

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/pkg/speakerconfig"
)

type speakerConfigCommand struct {
	trenchFlags
	frontendcmd.SpeakerFlags
	Kind string `arg:"" help:"Kind of speaker: frr or frr-k8s."`
}

func (c *speakerConfigCommand) Run(out *cli.Output) error {
	if kinds := speakerconfig.Kinds(); !slices.Contains(kinds, c.Kind) {
		return cli.Usage("unknown kind of speaker %q; use one of %s", c.Kind, strings.Join(kinds, ", "))
	}
	config, err := c.read(nil, false)
	if err != nil {
		return err
	}
	c.Speaker = "external"
	var refused cli.Refusals
	c.CheckSpeaker(&refused)
	if err := refused.Err(); err != nil {
		return err
	}
	peer, err := c.Peer()
	if err != nil {
		return cli.Usage("--speaker-address: %w", err)
	}
	speaker := speakerconfig.Speaker{
		Address: peer, AS: c.SpeakerAS, Frontend: c.SpeakerLocal, FrontendAS: c.LocalAS(), Listens: c.SpeakerListen,
		Trench: config.Trench, Gateways: config.Attractor.Gateways,
	}
	if c.SpeakerPasswordFile != "" {
		speaker.Password = speakerconfig.Placeholder
	}
	for _, v := range config.Attractor.VIPs {
		speaker.VIPs = append(speaker.VIPs, v.Prefix())
	}
	slices.SortFunc(speaker.VIPs, netip.Prefix.Compare)
	text, err := speaker.Text(c.Kind)
	if err != nil {
		return cli.Usage("%w", err)
	}
	out.Printf("%s", text)
	return nil
}
