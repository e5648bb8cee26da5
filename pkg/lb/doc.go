// Package lb is the load balancer's process: it knows which targets live, turns
// that into the readiness of VIPs, and streams it to the frontend.
//
// It guarantees that every watch gets every decision, that the lease is
// renewed only by the loop that evaluates readiness, and that a stop is announced
// to the frontend and waited for before anything is torn down. How targets are
// checked, how the stream works and who may read it are the matters of
// pkg/healthcheck, pkg/readiness and pkg/identity.
package lb
