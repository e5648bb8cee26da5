// Package rtnetlink reads and changes policy rules, routes, addresses, neighbor entries and network
// interfaces of a network namespace, and receives the kernel's notifications about them.
//
// It is the only encoder of rtnetlink messages in the project;
// docs/adr/0023-one-netlink-layer.md says why it is not one of the public libraries.
package rtnetlink
