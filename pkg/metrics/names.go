package metrics

import "github.com/prometheus/client_golang/prometheus"

// Type is the type of a metric.
type Type string

// The types in use.
const (
	Gauge     Type = "gauge"
	Counter   Type = "counter"
	Histogram Type = "histogram"
)

// Metric describes one metric.
type Metric struct {
	Name   string
	Type   Type
	Labels []string
	Help   string
	desc   *prometheus.Desc
}

var all []Metric

// All returns every metric of vipgate in the order of the documentation, without the standard
// collectors of the Go runtime and of the process (go_*, process_*).
func All() []Metric { return all }

func describe(t Type, name, help string, labels []string) Metric {
	metric := Metric{name, t, labels, help, prometheus.NewDesc(name, help, labels, nil)}
	all = append(all, metric)
	return metric
}

func gauge(name, help string, labels ...string) Metric { return describe(Gauge, name, help, labels) }

func counter(name, help string, labels ...string) Metric {
	return describe(Counter, name, help, labels)
}

func histogram(name, help string) Metric { return describe(Histogram, name, help, nil) }

// Metrics of all programs. The metrics of gRPC servers have the names of go-grpc-middleware's
// Prometheus provider, so that common dashboards work.
var (
	buildInfo = gauge("vipgate_build_info",
		"Constant 1, labelled by what runs.", "program", "version", "goversion")
	configurationValid = gauge("vipgate_configuration_valid",
		"1 while the trench file in force is the one on disk; 0 while the one on disk is refused and an older one "+
			"is in force. With the NSP, 0 while VIPs or gateways are refused.")
	configurationStale = gauge("vipgate_configuration_stale_seconds",
		"How long the writer of the trench file has not been able to refresh it, or the NSP has been absent. 0 while "+
			"it can, or does not say.")
	configurationHeld = gauge("vipgate_configuration_held",
		"VIPs, gateways and streams whose removal by the configuration waits for a confirmation.")
	configurationReloads = counter("vipgate_configuration_reloads_total",
		"Changes of the trench file, or of the list of the NSP, that were accepted or refused since the start.", "result")
	identityNotAfter = gauge("vipgate_identity_not_after_timestamp_seconds",
		"When our own X.509-SVID ends, in Unix time. Absent before the first one.", "spiffe_id")
	healthServing = gauge("vipgate_health_serving",
		"1 while the health service of that name is SERVING; vip/<prefix> has metrics of its own.", "service")
	logLinesLost = counter("vipgate_log_lines_lost_total",
		"Lines of the log that were dropped since the start, as stderr did not accept them in time.")
	tracesLost = counter("vipgate_traces_lost_total",
		"Decisions since the start whose trace is not complete: the queue was full, or the endpoint did not take it. "+
			"Absent without traces.")
	callsStarted = counter("grpc_server_started_total",
		"Calls begun, on all gRPC servers of the process.", "grpc_type", "grpc_service", "grpc_method")
	CallsHandled = counter("grpc_server_handled_total",
		"Calls ended, by how; a stream ends when its reader goes.",
		"grpc_type", "grpc_service", "grpc_method", "grpc_code")
	_ = counter("grpc_server_msg_received_total",
		"Messages that came in calls and streams.", "grpc_type", "grpc_service", "grpc_method")
	_ = counter("grpc_server_msg_sent_total",
		"Messages sent in calls and streams, heartbeats among them.", "grpc_type", "grpc_service", "grpc_method")
)

// Metrics of the frontend.
var (
	frontendVIPState = gauge("vipgate_frontend_vip_state",
		"What is done with the VIP: 0 withdrawn, 1 de-preferred (GRACEFUL_SHUTDOWN), 2 announced.", "vip", "family")
	frontendVIPReason = gauge("vipgate_frontend_vip_reason",
		"Constant 1 with the reason why the VIP is not announced. Absent while it is announced.",
		"vip", "family", "reason")
	frontendVIPPolicy = gauge("vipgate_frontend_vip_policy",
		"Constant 1 with the routing policy of an advertised VIP, by its index in attractor.policies, and the state that "+
			"selects its attributes: ready, draining, unknown, backup. Absent without a policy.",
		"vip", "family", "policy", "state")
	frontendVIPs = gauge("vipgate_frontend_vips",
		"Configured VIPs by advertisement and reason. A combination stays, at 0, once it was seen.",
		"family", "advertisement", "reason")
	frontendVIPTransitions = counter("vipgate_frontend_vip_transitions_total",
		"Changes of a VIP's advertisement, by the new one and its reason.", "to", "reason")
	frontendDecisionLatency = histogram("vipgate_frontend_decision_latency_seconds",
		"From the receipt of the input that caused the decision to the end of the write of the UPDATE to BIRD.")
	frontendGating = gauge("vipgate_frontend_gating",
		"1 while the load balancer's readiness gates advertisements; 0 with --gating=off.")
	frontendLBLive = gauge("vipgate_frontend_lb_live",
		"1 while the load balancer's lease holds. Absent with --gating=off.")
	frontendLBLeaseAge = gauge("vipgate_frontend_lb_lease_age_seconds",
		"How long ago the load balancer last renewed its lease. Absent before the first message.")
	frontendLBLeaseRemaining = gauge("vipgate_frontend_lb_lease_remaining_seconds",
		"How much of the load balancer's lease is left, negative once it ended. Absent before the first message.")
	frontendStreamReconnects = counter("vipgate_frontend_lb_stream_reconnects_total",
		"How often the readiness stream had to be opened again after a loss; planned moves do not count.")
	frontendStreamMoves = counter("vipgate_frontend_lb_stream_moves_total",
		"Planned moves of the readiness stream to a second connection, before an identity ends or to a replaced socket.")
	frontendProbeFailures = counter("vipgate_frontend_lb_probe_failures_total",
		"Probes of a load balancer of Meridio that it did not answer within a second.")
	frontendAnnouncerSessions = counter("vipgate_frontend_announcer_sessions_total",
		"BGP sessions with BIRD over loopback since the start. More than BIRD's starts means that sessions were lost.")
	frontendRoutingRepairs = counter("vipgate_frontend_source_routing_repairs_total",
		"How often marks, rules or routes of the frontend were repaired after another process changed them.")
	frontendGatewayUp = gauge("vipgate_frontend_gateway_up",
		"1 while the BGP session to the gateway is up, or the BFD session of a static gateway.", "gateway", "family")
	frontendGatewayHeld = gauge("vipgate_frontend_gateway_held",
		"1 while the frontend keeps the BFD session of a static gateway down.", "gateway", "family")
	frontendGatewayUptime = gauge("vipgate_frontend_gateway_uptime_seconds",
		"How long the BGP session to the gateway has been up. 0 while it is down.", "gateway", "family")
	frontendGatewayImported = gauge("vipgate_frontend_gateway_imported_routes",
		"Routes that BIRD took from the gateway.", "gateway", "family")
	frontendGatewayImportsBlocked = gauge("vipgate_frontend_gateway_imports_blocked",
		"1 while routes of the gateway beyond --import-limit are ignored.", "gateway", "family")
	frontendGatewayExported = gauge("vipgate_frontend_gateway_exported_routes",
		"Routes that BIRD sent to the gateway.", "gateway", "family")
	frontendGatewayExpected = gauge("vipgate_frontend_gateway_expected_routes",
		"Advertised VIPs of the gateway's family, all of which BIRD should send to it. 0 for a static gateway.",
		"gateway", "family")
	frontendNSPConnected = gauge("vipgate_frontend_nsp_connected",
		"1 while the NSP confirms the configuration in force. Absent with the trench file, as are the next ones.")
	frontendNSPCached = gauge("vipgate_frontend_nsp_configuration_cached",
		"1 while the configuration in force is that of the cache, since the NSP has not sent one since the start.")
	frontendNSPFailures = counter("vipgate_frontend_nsp_watch_failures_total",
		"Watches of the NSP since the start that failed or ended.")
	frontendNSPRefused = gauge("vipgate_frontend_nsp_refused_objects",
		"VIPs and gateways of the NSP that are refused; `frontend status` names each.", "kind")
	frontendNSPCacheFailures = counter("vipgate_frontend_nsp_cache_failures_total",
		"Failed reads and writes of the file that keeps the last configuration of the NSP.")
	frontendNSPRegistered = gauge("vipgate_frontend_nsp_registered",
		"1 while the frontend is registered at the NSP, as a gateway is up.")
	frontendNSPRegistrationFailures = counter("vipgate_frontend_nsp_registration_failures_total",
		"Calls since the start that failed to register or unregister the frontend at the NSP.")
	frontendSecretFailures = counter("vipgate_frontend_secret_watch_failures_total",
		"Watches of Secrets with gateways' passwords since the start that failed.")
	frontendSecretsUnknown = gauge("vipgate_frontend_secrets_unknown",
		"Secrets with gateways' passwords that cannot be watched now: their last passwords stay in use.")
	frontendBIRDUp       = gauge("vipgate_frontend_bird_up", "1 while BIRD runs and answers on its control socket.")
	frontendBIRDRestarts = counter("vipgate_frontend_bird_restarts_total",
		"Restarts of BIRD since the frontend started.")
	frontendBIRDConfigures = counter("vipgate_frontend_bird_configures_total",
		"Configurations that BIRD accepted since the frontend started.")
	frontendBIRDConfigured = gauge("vipgate_frontend_bird_configured",
		"1 while BIRD has the configuration that the trench file asks for; 0 while it refused that one and keeps "+
			"an older one.")
	frontendBIRDRefusals = counter("vipgate_frontend_bird_configure_failures_total",
		"Configurations that BIRD refused, or that could not be given to it, since the frontend started.")
	frontendBIRDRestores = counter("vipgate_frontend_bird_configuration_restores_total",
		"How often BIRD was configured again, since another process had configured it.")
	frontendBIRDControlLatency = histogram("vipgate_frontend_bird_control_latency_seconds",
		"How long BIRD takes to answer a command on its control socket.")
)

// Metrics of the load balancer.
var (
	lbVIPState = gauge("vipgate_lb_vip_state",
		"What the load balancer says of the VIP: 0 not ready, 1 draining, 2 ready.", "vip", "family")
	lbVIPReason = gauge("vipgate_lb_vip_reason",
		"Constant 1 with the reason why the VIP is not ready. Absent while it is ready.", "vip", "family", "reason")
	lbVIPReadyTargets = gauge("vipgate_lb_vip_ready_targets",
		"Targets of the VIP's family that are ready, over all its streams.", "vip", "family")
	lbVIPTargets = gauge("vipgate_lb_vip_targets",
		"Targets of the VIP's family, over all its streams.", "vip", "family")
	lbVIPs = gauge("vipgate_lb_vips",
		"VIPs by state and reason. A combination stays, at 0, once it was seen.", "family", "state", "reason")
	lbVIPTransitions = counter("vipgate_lb_vip_transitions_total",
		"Changes of a VIP's state, by the new one and its reason.", "to", "reason")
	lbFrontendConnected = gauge("vipgate_lb_frontend_connected",
		"1 while a frontend is connected whose reports count.")
	lbFrontendVIPs = gauge("vipgate_lb_frontend_advertised_vips", "VIPs that the frontend reports as advertised.")
	lbTargets      = gauge("vipgate_lb_targets",
		"Addresses of targets by state: starting, ready, not_ready, overdue, draining, drained.", "state")
	lbSourceLive = gauge("vipgate_lb_source_live",
		"1 while the source of targets can be asked; 0 while it is gone.", "source")
	lbSourceTargets  = gauge("vipgate_lb_source_targets", "Targets that come from the source.", "source")
	lbSourceProblems = gauge("vipgate_lb_source_problems",
		"What the source offers and is not taken; `lb status` names each.", "source")
	lbRegistryRejections = counter("vipgate_lb_registry_rejections_total",
		"Calls of the registry that were rejected since the start.")
	lbProbeLive = gauge("vipgate_lb_probe_live",
		"1 while the lease of the probe's verdicts holds. Absent without --probe-id, as are the next ones.", "probe")
	lbProbePaths = gauge("vipgate_lb_probe_paths",
		"Paths of the probe that lead to this pod, by state: reachable, dead.", "probe", "state")
	lbProbeSuspects = gauge("vipgate_lb_probe_dead_vips",
		"VIPs that enough probes find dead through this pod; the frontend de-prefers them.")
	lbProbeRejections = counter("vipgate_lb_probe_rejections_total",
		"Reports of probes that were rejected since the start.")
	lbDataPlaneTargets = gauge("vipgate_lb_dataplane_targets",
		"Addresses of targets in the data plane: serving (the kernel confirmed it), pending (it did not yet), "+
			"draining, down, unknown (left as it is). Absent without a data plane, as are the next ones.", "state")
	lbDataPlaneDrift = gauge("vipgate_lb_dataplane_drift",
		"Objects in the kernel that another process removed or changed and that are not repaired: held, or in "+
			"back-off; `lb status` names each.")
	lbDataPlaneRepairs = counter("vipgate_lb_dataplane_repairs_total",
		"Objects in the kernel that another process removed or changed and that were repaired.")
	lbDataPlaneHeld = gauge("vipgate_lb_dataplane_held",
		"Holds of the data plane (`lb hold`): of streams, or 1 for all of them.")
	lbDataPlaneProblems = gauge("vipgate_lb_dataplane_problems",
		"Things that the data plane could not do; `lb status` names each.")
	lbDataPlaneFailures = counter("vipgate_lb_dataplane_failures_total",
		"Attempts to change the data plane that failed as a whole since the start.")
	lbDataPlaneUnmatched = counter("vipgate_lb_dataplane_unmatched_packets_total",
		"Packets that a stream's match dropped since the rules of the stream were last written. Absent for streams "+
			"without a match.", "stream")
	lbFastPathInterfaces = gauge("vipgate_lb_fastpath_interfaces",
		"Interfaces by whether the fast path is attached; all 0 while it is detached. Absent without a fast path.",
		"attached")
	lbDataPlaneMoved = counter("vipgate_lb_dataplane_moved_packets_total",
		"Packets of flows that began in another pod, since the rules for them were last written: asked (copies to "+
			"another target), current and earlier (flows decided for the current target of their slot, and for "+
			"another one), denied (by all), full (too many flows are undecided).",
		"outcome")
	lbDataPlaneApply = histogram("vipgate_lb_dataplane_apply_seconds",
		"From a decision about the data plane to what the kernel confirmed of it.")
)

// Metrics of kube.
var (
	kubeTranslation = histogram("vipgate_kube_translation_seconds",
		"How long it takes to translate the objects into the trench file.")
	kubeLatency = histogram("vipgate_kube_latency_seconds",
		"From the first watch event of a burst to the trench file that was written for it.")
	kubeWrites = counter("vipgate_kube_file_writes_total",
		"Translations since the start that changed the trench file or a key file.")
	kubeWriteFailures = counter("vipgate_kube_file_write_failures_total",
		"Translations since the start that could not be written.")
	kubeWritten = gauge("vipgate_kube_file_written_timestamp_seconds",
		"When the trench file or a key file was last written, in Unix time. Absent before the first write.")
	kubeStale = gauge("vipgate_kube_stale_seconds",
		"For how long the trench file may have been older than the objects, as the API server cannot be watched or "+
			"the Trench does not exist. 0 while it is current.")
	kubeAPIErrors = counter("vipgate_kube_api_errors_total",
		"Lists, watches and probes of the API server since the start that failed.")
	kubeObjects = gauge("vipgate_kube_objects", "Objects that are watched, by kind.", "kind")
	kubeRefused = gauge("vipgate_kube_refused_objects",
		"Objects that are refused, or parts of them, by kind; `kube status` names each.", "kind")
	kubePublications = counter("vipgate_kube_publications_total",
		"Writes of status, reports and Events to the API server since the start, by what became of them.",
		"resource", "result")
	kubeLeader = gauge("vipgate_kube_leader", "1 while this pod writes the status of the objects.")
)

// Metrics of target.
var (
	targetComplete = gauge("vipgate_target_complete",
		"1 while all of the kernel state is installed: packets to the pool are accepted and answered.")
	targetProblems = gauge("vipgate_target_problems",
		"What keeps the kernel state from being complete; `target status` names each.")
	targetRepairs = counter("vipgate_target_repairs_total",
		"Parts of the kernel state since the start that another process removed or changed and that were restored.")
	targetPeers = gauge("vipgate_target_peers",
		"Trench pods on the link: live, or gone (no valid neighbor entry, and no packet in the last seconds).", "state")
	targetPeersFull = gauge("vipgate_target_peers_full",
		"1 while no further trench pod can be learned: replies through it are dropped.")
	targetPeersEvicted = counter("vipgate_target_peers_evicted_total",
		"Senders that were forgotten: without a neighbor entry above 768 peers, or outside of --peer-subnet.")
	targetDropped = counter("vipgate_target_dropped_packets_total",
		"Replies that were dropped, as no trench pod was known for them, since the rules were written.")
	targetFlows = gauge("vipgate_target_flows",
		"Connection tracking entries of VIPs by the link address of the trench pod that gets the replies.", "peer")
)

// Metrics of vipgate-probe.
var (
	probeVIPState = gauge("vipgate_probe_vip_state",
		"What users reach: 2 the VIP on all paths, 1 on some, 0 on none; -1 unknown, as it was not checked or not recently.",
		"vip", "family")
	probeVIPLatency = gauge("vipgate_probe_vip_latency_seconds",
		"Mean duration of the last checks over the VIP's reachable paths. Absent without one.", "vip", "family")
	probeDeadPath = gauge("vipgate_probe_dead_path",
		"Constant 1 for a dead path by source address and port, with the last router on it that answers; 256 at most.",
		"vip", "family", "source", "last_hop")
	probeDeadPathsOmitted = gauge("vipgate_probe_dead_paths_omitted",
		"Dead paths beyond those with a series of their own.")
	probePaths     = gauge("vipgate_probe_paths", "Paths by state: reachable, dead, unknown.", "state")
	probeReporting = gauge("vipgate_probe_lb_reporting",
		"1 while the load balancer accepts the verdicts of the probe. Absent without --lb, as is the next one.", "lb")
	probeReportFailures = counter("vipgate_probe_lb_report_failures_total",
		"Reports that the load balancer did not accept since the probe found its address.", "lb")
)
