// Package plan is the pure part of the data plane: the model of streams and targets, from
// the desired state to the objects in the kernel, and the functions that compute Maglev
// tables, owners of VIPs, drift, and the changes of a stream. It has no I/O.
package plan
