// Package rtnetlink reads and changes policy rules, routes, addresses, neighbor entries and
// network interfaces of a network namespace, and receives the kernel's notifications about them.
//
// It is the only encoder of rtnetlink messages in the project;
// docs/adr/0023-one-netlink-layer.md explains why no public library is used.
package rtnetlink
