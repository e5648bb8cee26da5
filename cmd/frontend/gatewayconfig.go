package main

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/bird/path"
	"github.com/vipgate/vipgate/pkg/gatewayconfig"
	"github.com/vipgate/vipgate/pkg/trench"
)

type gatewayConfigCommand struct {
	trenchFlags
	Kind  string   `arg:"" help:"Kind of router: frr, bird, gobgp or junos." enum:"frr,bird,gobgp,junos"`
	Names []string `arg:"" optional:"" name:"gateway|pods" help:"Names of the gateways that are one router (none: a text for each gateway), and addresses or subnets of the pods (none: this pod's)."`
}

func (c *gatewayConfigCommand) Run(out *cli.Output) error {
	config, err := c.read(nil, false)
	if err != nil {
		return err
	}
	gateways, pods, err := c.arguments(config.Attractor.Gateways)
	if err != nil {
		return err
	}
	routers := [][]trench.Gateway{gateways}
	if gateways == nil {
		routers = slices.Collect(slices.Chunk(config.Attractor.Gateways, 1))
	}
	for i, gateways := range routers {
		addresses := pods
		if pods == nil {
			if addresses, err = own(config.Attractor.Interface, gateways); err != nil {
				return err
			}
		}
		router, err := gatewayconfig.Of(config, gateways, addresses)
		if err != nil {
			return cli.Usage("%w", err)
		}
		text, err := router.Text(c.Kind)
		if err != nil {
			return cli.Usage("%w", err)
		}
		if i > 0 {
			text = "\n" + text
		}
		out.Printf("%s", text)
	}
	return nil
}

// arguments returns the named gateways and pods; nil for none.
func (c *gatewayConfigCommand) arguments(all []trench.Gateway) (named []trench.Gateway, pods []netip.Prefix,
	err error,
) {
	for _, text := range c.Names {
		i := slices.IndexFunc(all, func(gateway trench.Gateway) bool { return gateway.Name == text })
		prefix, errPrefix := netip.ParsePrefix(text)
		address, errAddress := netip.ParseAddr(text)
		switch {
		case i >= 0:
			named = append(named, all[i])
		case errPrefix == nil:
			pods = append(pods, prefix.Masked())
		case errAddress == nil:
			pods = append(pods, netip.PrefixFrom(address, address.BitLen()))
		default:
			return nil, nil, cli.Usage("%q is neither a gateway of %s nor an address or a subnet of pods", text, c.TrenchFile)
		}
	}
	return named, pods, nil
}

// own returns the addresses of this pod for sessions with gateways.
func own(device string, gateways []trench.Gateway) (pods []netip.Prefix, err error) {
	for _, gateway := range gateways {
		if gateway.Interface != "" {
			continue // the router learns the address
		}
		local, err := path.Local(device, gateway)
		if err != nil {
			return nil, cli.Usage("gateway %s: no address of this pod (%w); name the pods' addresses or their subnet, such as "+
				"169.254.100.0/24", gateway.Name, err)
		}
		if prefix := netip.PrefixFrom(local, local.BitLen()); !slices.Contains(pods, prefix) {
			pods = append(pods, prefix)
		}
	}
	return pods, nil
}
