// Package nft reads and writes nftables objects by netlink messages: transactions, listings in a
// normal form that is comparable with the written objects, and small tables that are described as
// a whole. Rules consist of the expressions of github.com/google/nftables/expr.
//
// A [Transaction] applies as a whole or not at all. Committed with a generation, it is rejected if
// another process changed the ruleset after that. An [Error] names the rejected object.
// Listings contain unknown expressions, so foreign changes of a rule are visible.
package nft
