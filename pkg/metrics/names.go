package metrics

// Names of the metrics that both programs have.
const (
	BuildInfo            = "vipgate_build_info"
	ConfigurationValid   = "vipgate_configuration_valid"
	ConfigurationReloads = "vipgate_configuration_reloads_total"
	IdentityNotAfter     = "vipgate_identity_not_after_timestamp_seconds"
	HealthServing        = "vipgate_health_serving"
)

// Names of the metrics of gRPC servers, which both programs have. They are those of the Prometheus
// provider of go-grpc-middleware, so that common dashboards work.
const (
	CallsStarted          = "grpc_server_started_total"
	CallsHandled          = "grpc_server_handled_total"
	CallsMessagesReceived = "grpc_server_msg_received_total"
	CallsMessagesSent     = "grpc_server_msg_sent_total"
)

// Names of the frontend's metrics.
const (
	FrontendVIPState           = "vipgate_frontend_vip_state"
	FrontendVIPReason          = "vipgate_frontend_vip_reason"
	FrontendVIPs               = "vipgate_frontend_vips"
	FrontendVIPTransitions     = "vipgate_frontend_vip_transitions_total"
	FrontendDecisionLatency    = "vipgate_frontend_decision_latency_seconds"
	FrontendGating             = "vipgate_frontend_gating"
	FrontendLBLive             = "vipgate_frontend_lb_live"
	FrontendLBLeaseAge         = "vipgate_frontend_lb_lease_age_seconds"
	FrontendLBLeaseRemaining   = "vipgate_frontend_lb_lease_remaining_seconds"
	FrontendStreamReconnects   = "vipgate_frontend_lb_stream_reconnects_total"
	FrontendStreamMoves        = "vipgate_frontend_lb_stream_moves_total"
	FrontendAnnouncerSessions  = "vipgate_frontend_announcer_sessions_total"
	FrontendRoutingRepairs     = "vipgate_frontend_source_routing_repairs_total"
	FrontendGatewayUp          = "vipgate_frontend_gateway_up"
	FrontendGatewayUptime      = "vipgate_frontend_gateway_uptime_seconds"
	FrontendGatewayImported    = "vipgate_frontend_gateway_imported_routes"
	FrontendGatewayExported    = "vipgate_frontend_gateway_exported_routes"
	FrontendBIRDUp             = "vipgate_frontend_bird_up"
	FrontendBIRDRestarts       = "vipgate_frontend_bird_restarts_total"
	FrontendBIRDConfigures     = "vipgate_frontend_bird_configures_total"
	FrontendBIRDConfigured     = "vipgate_frontend_bird_configured"
	FrontendBIRDRefusals       = "vipgate_frontend_bird_configure_failures_total"
	FrontendBIRDControlLatency = "vipgate_frontend_bird_control_latency_seconds"
)

// Names of the load balancer's metrics.
const (
	LBVIPState          = "vipgate_lb_vip_state"
	LBVIPReason         = "vipgate_lb_vip_reason"
	LBVIPReadyTargets   = "vipgate_lb_vip_ready_targets"
	LBVIPTargets        = "vipgate_lb_vip_targets"
	LBVIPs              = "vipgate_lb_vips"
	LBVIPTransitions    = "vipgate_lb_vip_transitions_total"
	LBFrontendConnected = "vipgate_lb_frontend_connected"
	LBFrontendVIPs      = "vipgate_lb_frontend_advertised_vips"
	LBTargets           = "vipgate_lb_targets"
	LBSourceLive        = "vipgate_lb_source_live"
	LBSourceTargets     = "vipgate_lb_source_targets"
	LBSourceProblems    = "vipgate_lb_source_problems"
	LBSourceRefusals    = "vipgate_lb_registry_refusals_total"
	LBSuspect           = "vipgate_lb_suspect"
	LBDataPlaneTargets  = "vipgate_lb_dataplane_targets"
	LBDataPlaneDrift    = "vipgate_lb_dataplane_drift"
	LBDataPlaneProblems = "vipgate_lb_dataplane_problems"
	LBDataPlaneFailures = "vipgate_lb_dataplane_failures_total"
	LBDataPlaneRepairs  = "vipgate_lb_dataplane_repairs_total"
	LBDataPlaneHeld     = "vipgate_lb_dataplane_held"
	LBDataPlaneApply    = "vipgate_lb_dataplane_apply_seconds"
)

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
}

// All describes every metric of vipgate in the order of the documentation. The standard collectors
// of the Go runtime and of the process (go_*, process_*) are added to them.
func All() []Metric {
	vip := []string{"vip", "family"}
	reason := []string{"vip", "family", "reason"}
	gateway := []string{"gateway", "family"}
	method := []string{"grpc_type", "grpc_service", "grpc_method"}
	return []Metric{
		{BuildInfo, Gauge, []string{"program", "version", "goversion"}, "Constant 1, labelled by what runs."},
		{ConfigurationValid, Gauge, nil, "1 while the trench file in force is the one on disk; 0 while the one on disk " +
			"is refused and an older one is in force."},
		{
			ConfigurationReloads, Counter,
			[]string{"result"},
			"Changes of the trench file that were accepted or refused since the start.",
		},
		{
			IdentityNotAfter, Gauge,
			[]string{"spiffe_id"},
			"When our own X.509-SVID ends, in Unix time. Absent before the first one.",
		},
		{
			HealthServing, Gauge,
			[]string{"service"},
			"1 while the health service of that name is SERVING; vip/<prefix> has metrics of its own.",
		},
		{CallsStarted, Counter, method, "Calls begun, on all gRPC servers of the process."},
		{
			CallsHandled, Counter,
			[]string{"grpc_type", "grpc_service", "grpc_method", "grpc_code"},
			"Calls ended, by how; a stream ends when its reader goes.",
		},
		{CallsMessagesReceived, Counter, method, "Messages that came in calls and streams."},
		{CallsMessagesSent, Counter, method, "Messages sent in calls and streams, heartbeats among them."},

		{
			FrontendVIPState, Gauge, vip,
			"What is done with the VIP: 0 withdrawn, 1 de-preferred (GRACEFUL_SHUTDOWN), 2 announced.",
		},
		{
			FrontendVIPReason, Gauge, reason,
			"Constant 1 with the reason why the VIP is not announced. Absent while it is announced.",
		},
		{
			FrontendVIPs, Gauge,
			[]string{"family", "advertisement", "reason"},
			"Configured VIPs by advertisement and reason. A combination stays, at 0, once it was seen.",
		},
		{
			FrontendVIPTransitions, Counter,
			[]string{"to", "reason"},
			"Changes of a VIP's advertisement, by the new one and its reason.",
		},
		{
			FrontendDecisionLatency, Histogram, nil,
			"From the receipt of the input that caused the decision to the end of the write of the UPDATE to BIRD.",
		},
		{FrontendGating, Gauge, nil, "1 while the load balancer's readiness gates advertisements; 0 with --gating=off."},
		{FrontendLBLive, Gauge, nil, "1 while the load balancer's lease holds. Absent with --gating=off."},
		{
			FrontendLBLeaseAge, Gauge, nil,
			"How long ago the load balancer last renewed its lease. Absent before the first message.",
		},
		{
			FrontendLBLeaseRemaining, Gauge, nil,
			"How much of the load balancer's lease is left, negative once it ended. Absent before the first message.",
		},
		{
			FrontendStreamReconnects, Counter, nil,
			"How often the readiness stream had to be opened again after a loss; planned moves do not count.",
		},
		{
			FrontendStreamMoves, Counter, nil,
			"Planned moves of the readiness stream to a second connection, before an identity ends.",
		},
		{
			FrontendAnnouncerSessions, Counter, nil,
			"BGP sessions with BIRD over loopback since the start. More than BIRD's starts means that sessions were lost.",
		},
		{
			FrontendRoutingRepairs, Counter, nil,
			"How often marks, rules or routes of the frontend were repaired after another process changed them.",
		},
		{FrontendGatewayUp, Gauge, gateway, "1 while the BGP session to the gateway is up."},
		{FrontendGatewayUptime, Gauge, gateway, "How long the BGP session to the gateway has been up. 0 while it is down."},
		{FrontendGatewayImported, Gauge, gateway, "Routes that BIRD took from the gateway."},
		{FrontendGatewayExported, Gauge, gateway, "Routes that BIRD sent to the gateway."},
		{FrontendBIRDUp, Gauge, nil, "1 while BIRD runs and answers on its control socket."},
		{FrontendBIRDRestarts, Counter, nil, "Restarts of BIRD since the frontend started."},
		{FrontendBIRDConfigures, Counter, nil, "Configurations that BIRD accepted since the frontend started."},
		{FrontendBIRDConfigured, Gauge, nil, "1 while BIRD has the configuration that the trench file asks for; 0 while " +
			"it refused that one and keeps an older one."},
		{
			FrontendBIRDRefusals, Counter, nil,
			"Configurations that BIRD refused, or that could not be given to it, since the frontend started.",
		},
		{FrontendBIRDControlLatency, Histogram, nil, "How long BIRD takes to answer a command on its control socket."},

		{LBVIPState, Gauge, vip, "What the load balancer says of the VIP: 0 not ready, 1 draining, 2 ready."},
		{LBVIPReason, Gauge, reason, "Constant 1 with the reason why the VIP is not ready. Absent while it is ready."},
		{LBVIPReadyTargets, Gauge, vip, "Targets of the VIP's family that are ready, over all its streams."},
		{LBVIPTargets, Gauge, vip, "Targets of the VIP's family, over all its streams."},
		{
			LBVIPs, Gauge,
			[]string{"family", "state", "reason"},
			"VIPs by state and reason. A combination stays, at 0, once it was seen.",
		},
		{LBVIPTransitions, Counter, []string{"to", "reason"}, "Changes of a VIP's state, by the new one and its reason."},
		{LBFrontendConnected, Gauge, nil, "1 while a frontend is connected whose reports count."},
		{LBFrontendVIPs, Gauge, nil, "VIPs that the frontend reports as advertised."},
		{
			LBTargets, Gauge,
			[]string{"state"},
			"Addresses of targets by state: starting, ready, not_ready, overdue, draining, drained.",
		},
		{LBSourceLive, Gauge, []string{"source"}, "1 while the source of targets can be asked; 0 while it is gone."},
		{LBSourceTargets, Gauge, []string{"source"}, "Targets that come from the source."},
		{LBSourceProblems, Gauge, []string{"source"}, "What the source offers and is not taken; `lb status` names each."},
		{LBSourceRefusals, Counter, nil, "Calls of the registry that were refused since the start."},
		{
			LBSuspect, Gauge, nil,
			"1 during a mass target failure, when the target network appears to be down (--sudden-loss).",
		},
		{LBDataPlaneTargets, Gauge, []string{"state"}, "Addresses of targets in the data plane: serving (the kernel " +
			"confirmed it), pending (it did not yet), draining, down, unknown (left as it is). Absent without a data plane, " +
			"as are the next ones."},
		{LBDataPlaneDrift, Gauge, nil, "Objects in the kernel that another process removed or changed and that are not " +
			"repaired: held, or in back-off; `lb status` names each."},
		{
			LBDataPlaneRepairs, Counter, nil,
			"Objects in the kernel that another process removed or changed and that were repaired.",
		},
		{LBDataPlaneHeld, Gauge, nil, "Holds of the data plane (`lb hold`): of streams, or 1 for all of them."},
		{LBDataPlaneProblems, Gauge, nil, "Things that the data plane could not do; `lb status` names each."},
		{LBDataPlaneFailures, Counter, nil, "Attempts to change the data plane that failed as a whole since the start."},
		{LBDataPlaneApply, Histogram, nil, "From a decision about the data plane to what the kernel confirmed of it."},
	}
}
