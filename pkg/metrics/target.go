package metrics

// Target holds the metrics of target. Its methods are safe for concurrent use and do not block.
// Create one with [NewTarget].
type Target struct{ *process }

// TargetState is the state of target at a scrape.
type TargetState struct {
	Complete bool
	Problems int
	Repairs  uint64 // since the start
	Dropped  uint64 // since the rules were written
	// Live and Gone count trench pods.
	Live, Gone int
	Full       bool   // no further trench pod can be learned
	Evicted    uint64 // since the start
	// Flows counts flows by the link address of the trench pod.
	Flows map[string]int
}

// NewTarget returns the metrics of target in a new registry, including the collectors of the Go
// runtime and of the process. Each scrape calls read.
func NewTarget(version string, read func() TargetState) *Target {
	t := &Target{newProcess("target", version)}
	t.registry.MustRegister(scrape(func(send send) {
		state := read()
		send(targetComplete, boolValue(state.Complete))
		send(targetProblems, float64(state.Problems))
		send(targetRepairs, float64(state.Repairs))
		send(targetDropped, float64(state.Dropped))
		send(targetPeers, float64(state.Live), "live")
		send(targetPeers, float64(state.Gone), "gone")
		send(targetPeersFull, boolValue(state.Full))
		send(targetPeersEvicted, float64(state.Evicted))
		sendAll(send, targetFlows, state.Flows)
	}))
	return t
}
