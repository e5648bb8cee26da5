// Package nlmsg encodes and decodes netlink messages and exchanges them with the kernel. It
// exists beside general libraries because one nftables transaction of the data plane has
// many thousand elements.
package nlmsg
