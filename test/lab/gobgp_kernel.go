package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
)

// InstallRoutes installs gobgpd's best routes in the kernel of its namespace, in place of the zebra
// that gobgpd needs for that, until ctx ends or a route cannot be installed. The function that it
// returns waits for that end.
func (g *GoBGP) InstallRoutes(ctx context.Context) (wait func() error, err error) {
	cmd := exec.CommandContext(ctx, "gobgp", "--target", "unix://"+g.socket(), "-j", "monitor", "global", "rib",
		"--current")
	changes, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("routes of gateway %s: %w", g.Name, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("routes of gateway %s: %w", g.Name, err)
	}
	done := make(chan error, 1)
	go func() {
		err := g.install(json.NewDecoder(changes))
		_ = cmd.Wait() // ctx kills it
		if ctx.Err() == nil {
			err = fmt.Errorf("routes of gateway %s in the kernel: %w", g.Name, err)
		} else {
			err = nil
		}
		done <- err
	}()
	return func() error { return <-done }, nil
}

// install installs the changes of the table until their end, which is an error.
func (g *GoBGP) install(changes *json.Decoder) error {
	for {
		var paths []struct {
			NLRI       goBGPPrefix      `json:"nlri"`
			Attributes []goBGPAttribute `json:"attrs"`
			Withdrawal bool             `json:"withdrawal"`
		}
		if err := changes.Decode(&paths); err != nil {
			return err
		}
		for _, path := range paths {
			var errs []error
			route := Route{Prefix: path.NLRI.Prefix}
			for _, attribute := range path.Attributes {
				errs = append(errs, attribute.addTo(&route))
			}
			switch {
			case route.Prefix.Bits() == 0: // its own default routes
			case path.Withdrawal:
				errs = append(errs, g.NS.Batch("route del "+route.Prefix.String()))
			default:
				errs = append(errs, g.NS.Batch(fmt.Sprintf("route replace %s via %s", route.Prefix, route.NextHop)))
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
		}
	}
}
