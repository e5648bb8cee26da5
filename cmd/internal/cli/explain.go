package cli

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ExplainFlags are the flags of the explain commands.
type ExplainFlags struct {
	AdminFlags
	Output string `short:"o" help:"table or json." enum:"table,json" default:"table"`
	VIP    string `arg:"" name:"vip" help:"A VIP such as 20.0.0.1."`
}

// Chain returns the chain of the VIP, without steps.
func (f ExplainFlags) Chain() (*status.Chain, error) {
	parsed, err := ParseVIP(f.VIP)
	if err != nil {
		return nil, err
	}
	return &status.Chain{VIP: parsed}, nil
}

// ParseVIP returns the canonical form of a VIP, which may be an address.
func ParseVIP(text string) (string, error) {
	if address, err := netip.ParseAddr(text); err == nil {
		text = fmt.Sprintf("%s/%d", strings.ToLower(text), address.BitLen())
	}
	parsed, err := vip.Parse(text)
	if err != nil {
		return "", Usage("%w", err)
	}
	return parsed.String(), nil
}

// Show prints a chain, and returns ExitFailed unless it is good.
func (f ExplainFlags) Show(out *Output, chain *status.Chain) error {
	text := chain.Text()
	if f.Output == "json" {
		var err error
		if text, err = chain.JSON(); err != nil {
			return err
		}
	}
	out.Printf("%s", text)
	if !chain.Good() {
		return ExitError(ExitFailed)
	}
	return nil
}
