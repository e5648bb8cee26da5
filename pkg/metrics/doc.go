// Package metrics defines every Prometheus metric of vipgate.
//
// Every name is a constant in names.go, and [All] describes each metric once: help, type, labels
// and documentation are derived from it. Calls of gRPC servers are counted by a provider with its
// own names; a test compares them with names.go.
//
// A scrape blocks no method longer than the copy of a small record per VIP takes.
package metrics
