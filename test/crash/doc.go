// Package crash kills a process at a step of a change of the data plane, as the kernel would.
package crash
