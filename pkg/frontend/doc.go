// Package frontend wires the frontend process: it observes a readiness source and BIRD's gateway
// sessions, and advertises a VIP only while both are up.
//
// The path from an input over the gate to the announcer never waits for I/O. Every transition of a
// VIP is logged and kept as an event with its cause. A stop moves traffic away before anything is
// torn down. Package gate decides, bird runs the sessions, announce sends decisions to BIRD, and
// kernel installs source routing. docs/architecture.md shows the data flow.
package frontend
