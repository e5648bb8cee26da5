// Package quickstart creates a laboratory for one machine: network namespaces of a trench pod, two
// BIRD gateways and two targets, with fixed names. It runs on after the command that created it.
// Its removal leaves no process, namespace or file, also after a killed run.
package quickstart
