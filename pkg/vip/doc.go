// Package vip defines the VIP: an address or a block of addresses that a trench serves.
package vip
