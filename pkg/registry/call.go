package registry

import (
	"net/netip"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"

	"github.com/vipgate/vipgate/pkg/latest"
)

// caller is who calls. The zero caller is the operator, on the admin socket.
type caller struct{ id spiffeid.ID }

// operatorName is what the operator is called where others have a SPIFFE ID.
const operatorName = "operator"

func (c caller) operator() bool { return c == caller{} }

// String returns the SPIFFE ID, or "operator".
func (c caller) String() string {
	if c.operator() {
		return operatorName
	}
	return c.id.String()
}

// announced is a target as a call announces it.
type announced struct {
	name string
	ips  []netip.Addr
}

// announcement is what one Register says, in a form that makes sense.
type announcement struct {
	stream  string
	targets []announced
	// grace is how long the targets outlive the call, if asked is true.
	grace time.Duration
	asked bool
}

// call is one open Register. What is not constant is guarded by Registry.mu.
type call struct {
	owner  caller
	stream string
	grace  time.Duration
	// changed is of size 1: one of the following changed.
	changed chan struct{}
	held    map[string]*registration
	gone    []string // names that left since they were last asked for
	taken   string   // the name that another call took over last
	over    callEnd
}

// callEnd is how a call ends that holds nothing any more.
type callEnd uint8

const (
	stillHolds callEnd = iota
	allLeft
	allTaken
)

// begin counts a call; done must be called when it ends. The bound is twice the
// quota: a caller that comes back is let in before its old calls have ended.
func (r *Registry) begin(who caller) (done func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.stopped:
		return nil, errStopping
	case !who.operator() && r.calls[who] >= 2*r.Quota:
		return nil, refuse(RefusedQuota, codes.ResourceExhausted, "%s has %d calls open, the limit: register more targets in one call, or have --target-quota raised", who, r.calls[who])
	}
	r.calls[who]++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.calls[who]--; r.calls[who] == 0 {
			delete(r.calls, who)
		}
	}, nil
}

// lose takes a target from a call.
func (c *call) lose(name string, end callEnd) {
	delete(c.held, name)
	if len(c.held) == 0 {
		c.over = end
	}
	latest.Wake(c.changed)
}

// holding tells what a call still holds, which of its targets left since it was
// last asked, and how the call ends if it holds nothing.
func (r *Registry) holding(c *call) (held map[string]struct{}, gone []string, over callEnd) {
	r.mu.Lock()
	defer r.mu.Unlock()
	held = make(map[string]struct{}, len(c.held))
	for name := range c.held {
		held[name] = struct{}{}
	}
	gone, c.gone = c.gone, nil
	return held, gone, c.over
}
