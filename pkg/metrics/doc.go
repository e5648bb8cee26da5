// Package metrics defines every Prometheus metric of vipgate.
//
// names.go describes each metric once, in the order of the documentation. A provider with its own
// metric names counts the calls of gRPC servers; a test compares them with names.go.
//
// A scrape blocks other methods only while it copies a small record per VIP.
package metrics
