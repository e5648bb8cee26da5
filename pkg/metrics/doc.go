// Package metrics defines every Prometheus metric of vipgate.
//
// names.go describes each metric once, in the order of the documentation. Calls of gRPC servers are
// counted by a provider with its own names; a test compares them with names.go.
//
// A scrape blocks no method longer than the copy of a small record per VIP takes.
package metrics
