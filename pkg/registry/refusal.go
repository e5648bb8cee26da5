package registry

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Refusal is why a call was refused, in a word that may be the label of a metric.
type Refusal string

// The refusals.
const (
	RefusedIdentity Refusal = "identity" // the caller may not do that for the stream
	RefusedQuota    Refusal = "quota"    // the caller, or all together, have too many targets or calls
	RefusedStream   Refusal = "stream"   // there is no such stream, or it has no check
	RefusedInput    Refusal = "input"    // an invalid name, duration or list
	RefusedAddress  Refusal = "address"  // an address that no target may have
	RefusedConflict Refusal = "conflict" // a name or an address that belongs to another registration
	RefusedUnknown  Refusal = "unknown"  // no such target is registered
	RefusedStopping Refusal = "stopping" // the load balancer starts or stops
)

// refusalCodes are the usual codes of refusals.
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

// refusal is the error of a call that is refused.
type refusal struct {
	why  Refusal
	code codes.Code
	text string
}

func refuse(why Refusal, format string, args ...any) *refusal {
	return &refusal{why, refusalCodes[why], fmt.Sprintf(format, args...)}
}

// as replaces the usual code.
func (r *refusal) as(code codes.Code) *refusal {
	r.code = code
	return r
}

// Error returns the text.
func (r *refusal) Error() string { return r.text }

// GRPCStatus makes it the status of the call.
func (r *refusal) GRPCStatus() *status.Status { return status.New(r.code, r.text) }
