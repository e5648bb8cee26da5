// Package lb is the load balancer's process: it knows which targets live, turns that into the
// readiness of VIPs, and streams it to the frontend.
//
// Every watch gets every decision, only the loop that evaluates readiness renews the lease, and a
// stop is announced to the frontend before anything is torn down. Targets are checked by
// pkg/healthcheck; pkg/readiness and pkg/identity serve the stream and authorize its readers.
package lb
