// Package traffic measures what happens to real traffic while a trench changes: two gateways that
// spread flows over three trench pods, targets with namespaces of their own, and clients that keep
// asking. The same scenarios are acts of the demo and end-to-end tests: [Scenarios] of the second
// act, [Rollout] of the third one.
//
// A [Trench] is either gated, as vipgate is meant to be used, or the control: the same programs
// with --gating=off, without drain times and without an announcement before a process or target
// ends. A scenario that loses nothing in both would prove nothing.
//
// How the lab is built is the matter of test/lab, how traffic is generated and counted that of
// test/load.
package traffic
