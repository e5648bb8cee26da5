// Package nlmsg encodes and decodes netlink messages and exchanges them with the kernel.
// docs/adr/0024-own-nftables-messages.md says why it exists beside public libraries.
package nlmsg
