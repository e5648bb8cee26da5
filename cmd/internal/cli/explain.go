package cli

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/identity"
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
	vip, err := ParseVIP(f.VIP)
	return &status.Chain{VIP: vip}, err
}

// ParseVIP returns a VIP as the programs write it; an address is a prefix of its whole length.
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

// Bounds of calls without which an explanation is not complete. BIRD answers within 20 ms.
const lbTimeout, exportsTimeout = 2 * time.Second, 500 * time.Millisecond

// ExplainPod adds the steps that a frontend confirms and, if lb has its admin socket with its
// default name in the same folder, those of lb.
func ExplainPod(ctx context.Context, chain *status.Chain, socket string) error {
	path, err := identity.SocketPath(socket)
	if err != nil {
		return err
	}
	lb := AdminFlags{AdminSocket: "unix://" + filepath.Join(filepath.Dir(path), "lb.sock")}
	// A process that hangs must not delay what the other one confirms.
	short, cancel := context.WithTimeout(ctx, lbTimeout)
	defer cancel()
	balancer, err := Call(short, "lb", lb, lbv1.NewLBServiceClient, lbv1.LBServiceClient.GetStatus,
		&adminv1.GetStatusRequest{})
	if err == nil {
		chain.LBSteps(balancer, time.Now())
	} else {
		why := Explain(err).Error()
		if grpcstatus.Code(err) == codes.DeadlineExceeded {
			why = fmt.Sprintf("it did not answer within %v: it hangs, or has no CPU", lbTimeout)
		}
		chain.Unasked = "lb was not asked (" + why + "): `lb explain " + chain.VIP + "` in its container"
	}
	frontend := AdminFlags{AdminSocket: socket}
	// Before the status, which shows a BIRD that hangs: the attributes are missing then.
	short, cancel = context.WithTimeout(ctx, exportsTimeout)
	defer cancel()
	exports, err := Call(short, "frontend", frontend, frontendv1.NewFrontendServiceClient,
		frontendv1.FrontendServiceClient.ListExports, &frontendv1.ListExportsRequest{Vip: chain.VIP})
	if err == nil {
		chain.Exported(exports.GetExports())
	}
	current, err := Call(ctx, "frontend", frontend, frontendv1.NewFrontendServiceClient,
		frontendv1.FrontendServiceClient.GetStatus, &adminv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	chain.FrontendSteps(current, time.Now())
	return nil
}

// ShowChain prints a chain as a table or as JSON, and returns ExitFailed unless it is good.
func ShowChain(out *Output, chain *status.Chain, format string) error {
	if format == "json" {
		text, err := chain.JSON()
		if err != nil {
			return err
		}
		out.Printf("%s", text)
	} else {
		out.Show(chain.Text())
	}
	if !chain.Good() {
		return ExitError(ExitFailed)
	}
	return nil
}
