// Package quickstart creates a laboratory for one machine: network namespaces of a trench pod, two
// BIRD gateways and two targets, with fixed names. It keeps running without the command that created
// it, and removing it leaves no process, namespace or file, also after a killed run.
package quickstart
