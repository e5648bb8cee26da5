package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
)

// MaxTargetsPerCall limits the targets of one Register or Deregister call.
const MaxTargetsPerCall = 1000

// announcement is a validated RegisterRequest.
type announcement struct {
	stream  string
	targets []trench.Target
	grace   *time.Duration // requested grace period; nil: not requested
}

func parseAnnouncement(req *targetv1.RegisterRequest) (announcement announcement, err error) {
	announcement.stream = req.GetStream()
	if err := checkCount(len(req.GetTargets())); err != nil {
		return announcement, err
	}
	if announcement.grace, err = parseDuration("grace", req.GetGrace()); err != nil {
		return announcement, err
	}
	names, owners := map[string]bool{}, map[netip.Addr]string{}
	for _, target := range req.GetTargets() {
		name := target.GetName()
		if err := targetset.CheckName(name); err != nil {
			return announcement, refuse(RefusedInput, "a target %v", err)
		}
		if names[name] {
			return announcement, refuse(RefusedInput, "target %s is there twice: write all its addresses into one", name)
		}
		names[name] = true
		ips, err := parseAddresses(target.GetAddresses())
		if err != nil {
			return announcement, refuse(RefusedAddress, "target %s: %v", name, err)
		}
		for _, addr := range ips {
			if other, twice := owners[addr]; twice {
				return announcement, refuse(RefusedAddress,
					"target %s: %s is the address of target %s as well: an address belongs to one target",
					name, addr, other)
			}
			owners[addr] = name
		}
		announcement.targets = append(announcement.targets, trench.Target{Name: name, IPs: ips})
	}
	return announcement, nil
}

// checkCount refuses calls that name no target or too many.
func checkCount(count int) error {
	switch {
	case count == 0:
		return refuse(RefusedInput, "no target is named: name 1 to %d", MaxTargetsPerCall)
	case count > MaxTargetsPerCall:
		return refuse(RefusedInput,
			"%d targets in one call: name 1 to %d, and use several calls for more", count, MaxTargetsPerCall)
	}
	return nil
}

// parseDuration validates an optional duration of a request. It returns nil for nil.
func parseDuration(what string, duration *durationpb.Duration) (*time.Duration, error) {
	if duration == nil {
		return nil, nil
	}
	if err := duration.CheckValid(); err != nil {
		return nil, refuse(RefusedInput, "%s: %v", what, err)
	}
	length := duration.AsDuration()
	if length < 0 || length > trench.MaxDrainTime {
		return nil, refuse(RefusedInput, "%s is %v: 0s to %v may be asked for", what, length, trench.MaxDrainTime)
	}
	return &length, nil
}

func parseAddresses(texts []string) (ips []netip.Addr, err error) {
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("%s is not an IP address: "+
				"write one such as 172.16.1.1 or fd00::1, without a prefix length", targetset.Quote(text))
		}
		ips = append(ips, addr)
	}
	return ips, checkAddresses(ips)
}

// checkAddresses returns an error if the addresses of one target are invalid.
func checkAddresses(ips []netip.Addr) error {
	switch {
	case len(ips) == 0, len(ips) > 2:
		return fmt.Errorf("it has %d addresses: write one or two, at most one of a family", len(ips))
	case slices.Contains(ips, netip.Addr{}):
		return errors.New("an address is empty: write one such as 172.16.1.1")
	case len(ips) == 2 && ips[0].Unmap().Is4() == ips[1].Unmap().Is4():
		return fmt.Errorf("%s and %s are of one family: write at most one of each", ips[0], ips[1])
	}
	return nil
}

// Refusal is the reason of a refused call, as the value of a metric label.
type Refusal string

// The refusals.
const (
	RefusedIdentity Refusal = "identity" // the caller is not authorized
	RefusedQuota    Refusal = "quota"    // too many targets or calls, of the caller or in total
	RefusedStream   Refusal = "stream"   // the stream does not exist or has no check
	RefusedInput    Refusal = "input"    // an invalid name, duration or list
	RefusedAddress  Refusal = "address"  // an invalid or forbidden address
	RefusedConflict Refusal = "conflict" // a name or an address that belongs to another registration
	RefusedUnknown  Refusal = "unknown"  // the target is not registered
	RefusedStopping Refusal = "stopping" // the load balancer is starting or stopping
)

// refusalCodes maps refusals to their default status codes.
var refusalCodes = map[Refusal]codes.Code{
	RefusedIdentity: codes.PermissionDenied,
	RefusedQuota:    codes.ResourceExhausted,
	RefusedStream:   codes.NotFound,
	RefusedInput:    codes.InvalidArgument,
	RefusedAddress:  codes.InvalidArgument,
	RefusedConflict: codes.AlreadyExists,
	RefusedUnknown:  codes.NotFound,
	RefusedStopping: codes.Unavailable,
}

var (
	errStopping = refuse(RefusedStopping, "the load balancer is stopping")
	errStarting = refuse(RefusedStopping, "the load balancer is starting")
)

// refusal is the error of a refused call.
type refusal struct {
	why  Refusal
	code codes.Code
	text string
}

func refuse(why Refusal, format string, args ...any) *refusal {
	return &refusal{why, refusalCodes[why], fmt.Sprintf(format, args...)}
}

// as replaces the default status code.
func (refusal *refusal) as(code codes.Code) *refusal {
	refusal.code = code
	return refusal
}

// Error returns the text.
func (refusal *refusal) Error() string { return refusal.text }

// GRPCStatus returns the gRPC status of the call.
func (refusal *refusal) GRPCStatus() *status.Status { return status.New(refusal.code, refusal.text) }
