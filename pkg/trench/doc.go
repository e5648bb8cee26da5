// Package trench holds the configuration of a trench: its model, the defaults and the validation.
//
// A [Config] that [Config.Complete] returned, and in which [Validate] finds no problem, is complete
// (defaults are filled in), consistent (every VIP of a stream is a VIP of the attractor, VIPs do
// not overlap, names and addresses are unique where required) and immutable. Callers need not
// validate it again. Package file reads such a configuration from the trench file and writes it.
package trench
