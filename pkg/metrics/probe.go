package metrics

// Probe holds the metrics of vipgate-probe. Its methods are safe for concurrent use and do not
// block. Create one with [NewProbe].
type Probe struct{ *process }

// maxDeadPaths bounds the series of dead paths, however many VIPs are dead.
const maxDeadPaths = 256

// ProbeState is the state of vipgate-probe at a scrape.
type ProbeState struct {
	VIPs []ProbedVIP
	// Reachable, Dead and Unknown count paths.
	Reachable, Dead, Unknown int
	// Reports lists the load balancers that get verdicts.
	Reports []ProbeReports
}

// ProbeReports counts reports to a load balancer.
type ProbeReports struct {
	LB        string
	Reporting bool
	Failures  uint64
}

// ProbedVIP is the state of a VIP at a scrape.
type ProbedVIP struct {
	VIP, Family string
	State       int
	Latency     float64 // in seconds; 0 if no path is reachable
	DeadPaths   []DeadPath
}

// DeadPath is a dead path of a VIP.
type DeadPath struct{ Source, LastHop string }

// NewProbe returns the metrics of vipgate-probe in a new registry, including the collectors of the
// Go runtime and of the process. Each scrape calls read.
func NewProbe(version string, read func() ProbeState) *Probe {
	p := &Probe{newProcess("vipgate-probe", version)}
	p.registry.MustRegister(scrape(func(send send) {
		state := read()
		room, omitted := maxDeadPaths, 0
		for _, v := range state.VIPs {
			send(probeVIPState, float64(v.State), v.VIP, v.Family)
			if v.Latency > 0 {
				send(probeVIPLatency, v.Latency, v.VIP, v.Family)
			}
			for _, path := range v.DeadPaths {
				if room == 0 {
					omitted++
					continue
				}
				room--
				send(probeDeadPath, 1, v.VIP, v.Family, path.Source, path.LastHop)
			}
		}
		send(probeDeadPathsOmitted, float64(omitted))
		send(probePaths, float64(state.Reachable), "reachable")
		send(probePaths, float64(state.Dead), "dead")
		send(probePaths, float64(state.Unknown), "unknown")
		for _, reports := range state.Reports {
			send(probeReporting, boolValue(reports.Reporting), reports.LB)
			send(probeReportFailures, float64(reports.Failures), reports.LB)
		}
	}))
	return p
}
