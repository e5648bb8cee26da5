// Package lb implements the load balancer process: it checks targets, derives the readiness of
// VIPs, and streams it to the frontend.
//
// Every watch gets every decision, only the loop that evaluates readiness renews the lease, and a
// stop is announced to the frontend before anything is torn down. Package healthcheck checks
// targets; packages readiness and identity serve the stream and authorize its readers.
package lb
