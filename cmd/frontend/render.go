package main

import (
	"fmt"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/bird"
)

type renderCommand struct {
	trenchFlags
	birdFlags
	kernelFlags
}

// Run prints BIRD's configuration as it would be here and now.
func (c *renderCommand) Run(out *cli.Output) error {
	config, err := c.read(false)
	if err != nil {
		return err
	}
	o := c.birdFlags.options(&c.kernelFlags)
	o.Password = "generated at each start"
	s := bird.NewSupervisor(o)
	s.Configure(config.Attractor.Gateways, config.Attractor.VIPs)
	input, problems := s.Input()
	content, err := bird.Render(input)
	if err != nil {
		return err
	}
	for _, g := range config.Attractor.Gateways {
		if problem := problems[g.Name]; problem != "" {
			fmt.Fprintf(os.Stderr, "frontend: gateway %s has no session: %s\n", g.Name, problem)
		}
	}
	out.Printf("%s", content)
	return nil
}
