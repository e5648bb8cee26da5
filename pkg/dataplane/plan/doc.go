// Package plan models streams and targets, from the desired state to kernel objects, and
// computes Maglev tables, VIP owners, drift, and the changes of a stream. It performs no I/O.
package plan
