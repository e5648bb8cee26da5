// Package vip holds the VIP: the address, or the block of addresses, that a
// trench offers to the outside.
//
// A [VIP] is a canonical prefix that may be advertised; the zero value is the
// only invalid one, so the holder of a VIP need not check it again. Whether a
// VIP is configured, ready or advertised is known elsewhere.
package vip
