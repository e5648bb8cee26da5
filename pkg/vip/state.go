package vip

// State is the load balancer's state of a VIP. The zero State is NotReady.
type State uint8

// The states of a VIP.
const (
	// NotReady: traffic to the VIP would be dropped.
	NotReady State = iota
	// Ready: traffic to the VIP can be forwarded to a target.
	Ready
	// Draining: traffic is still forwarded, but only until the end of the drain.
	Draining
)

// String returns "not ready", "ready" or "draining".
func (s State) String() string { return [...]string{"not ready", "ready", "draining"}[s] }
