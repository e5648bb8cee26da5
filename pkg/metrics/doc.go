// Package metrics holds every Prometheus metric of vipgate.
//
// Every name is a constant in names.go, and [All] describes each metric once:
// help, type and labels come from there, and so does the documentation. Calls of
// gRPC servers are counted by a provider that brings its own names; a test holds
// them to ours.
//
// It guarantees that no method waits for a scrape longer than the copy of a
// small record for each VIP takes, that labels come from closed sets (reasons,
// states, families) or from the trench file (VIPs, gateways), and that what
// leaves the trench file leaves the metrics. Per VIP there are, at most, two
// series (frontend) or four (lb); the counts by reason are there for those who
// alert without them.
//
// It leaves to others what the values are.
package metrics
