// Package vip defines the VIP: an address or a block of addresses that a trench serves.
//
// A [VIP] is a canonical prefix that may be advertised. Only the zero value is invalid, so the
// holder of a VIP need not validate it again.
package vip
