// Package tracing exports the steps of decisions as traces over OTLP/gRPC. The standard environment
// variables of OpenTelemetry configure it; without an endpoint there is no exporter.
//
// Load balancer and frontend derive trace and sampling from the position of a decision, so that the
// steps of both are one trace although the protocol has no field for it. A full queue and a dead
// endpoint discard steps and count them; neither delays a decision.
package tracing
