// Package nlmsg encodes and decodes netlink messages and exchanges them with the kernel.
// docs/adr/0024-own-nftables-messages.md explains why the public libraries do not suffice.
package nlmsg
