// Package orders interprets operators' drains of a frontend: of VIPs, of every VIP and of gateways.
// It refuses the drain of the last advertiser of a VIP and of the last gateway of a family.
package orders
