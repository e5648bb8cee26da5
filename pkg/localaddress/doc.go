// Package localaddress makes VIPs local addresses of an interface while this host serves them.
//
// It has the interface of a data plane: the desired state has the streams with their targets,
// all of them this host, and the confirmed state has the VIPs whose addresses were read back
// from the kernel. So package serving reports a VIP as ready after its address exists, and keeps
// the address until the VIP is withdrawn. Without the address, processes on this host reach the
// VIP at another host.
//
// The kernel is the record: the addresses of this package have a metric of their own
// ([rtnetlink.MetricVIP]), by which the next process finds them. Other addresses are never removed.
package localaddress
