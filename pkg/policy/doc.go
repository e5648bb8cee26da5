// Package policy selects the path attributes of each VIP by its state.
//
// It is pure. A VIP without a policy has the attributes that it had before there were policies, and
// a de-preferred VIP has GRACEFUL_SHUTDOWN under every policy.
package policy
