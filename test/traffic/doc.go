// Package traffic measures the effect of trench changes on real traffic: two gateways that
// spread flows over three trench pods, targets in separate namespaces, and clients that send
// requests continuously. The same scenarios are acts of the demo and end-to-end tests:
// [Scenarios] of the second act, [Rollout] of the third one.
//
// A [Trench] is either gated, as vipgate is meant to be used, or the control: the same programs
// with --gating=off, without drain times and without an announcement before a process or target
// ends. A scenario that loses nothing in both would prove nothing.
//
// Package lab builds the topology; package load generates and counts the traffic.
package traffic
