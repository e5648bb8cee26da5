package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/pkg/trench"
)

type speakerConfigCommand struct {
	trenchFlags
	frontendcmd.SpeakerFlags
	Kind     string     `arg:"" help:"Kind of speaker: bird, frr, frr-k8s or gobgp."`
	RouterID netip.Addr `help:"Router ID of GoBGP." placeholder:"ADDR" group:"External speaker"`
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
	peer, _ := c.Peer() // CheckSpeaker has refused an invalid one
	speaker := speakerconfig.Speaker{
		Address: peer, AS: c.SpeakerAS, Frontend: c.SpeakerLocal, FrontendAS: c.LocalAS(), Listens: c.SpeakerListen,
		Trench: config.Trench, Gateways: config.Attractor.Gateways, Prepends: prepends(config.Attractor.Policies),
		RouterID: c.RouterID,
	}
	if c.GatewayState == "bmp" {
		if speaker.BMP, err = netip.ParseAddrPort(c.Socket()); err != nil {
			return cli.Usage("--speaker-socket: %w: write where BMP arrives, such as %s", err, frontendcmd.DefaultBMP)
		}
	}
	if c.HasPassword() {
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
	if c.HasPassword() {
		if err := createPassword(c.PasswordFile()); err != nil {
			return fmt.Errorf("--speaker-password-file: %w; with none the session has no password", err)
		}
		// Of a file that existed. An operator needs no right to read it.
		if _, err := c.Password(); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	out.Printf("%s", text)
	return nil
}

// createPassword writes a random password into a file that does not exist.
func createPassword(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, announce.NewPassword())
	return errors.Join(err, file.Close())
}

// prepends reports whether a policy lengthens paths.
func prepends(policies []trench.Policy) bool {
	return slices.ContainsFunc(policies, func(policy trench.Policy) bool {
		states := []*trench.Attributes{&policy.Ready, policy.Draining, policy.Unknown, policy.Backup}
		return slices.ContainsFunc(states, func(attributes *trench.Attributes) bool {
			return attributes != nil && attributes.Prepend > 0
		})
	})
}
