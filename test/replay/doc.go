// Replay injects the causes of public incidents into two trench pods with two gateways, and measures
// two numbers for each VIP: black-hole seconds, in which a gateway holds a route to the VIP and
// requests through that gateway fail; and dark seconds, in which no gateway holds a route although a
// pod would forward.
//
// Clients of each gateway send requests to each VIP. Further clients send requests to each pod
// directly, whatever is advertised. The gateways' BIRD logs every update. [measure] computes the
// numbers from these records; it shares no code with vipgate.
//
// Package lab builds the topology; package load generates the traffic. The reference is the common
// pattern in place of vipgate: BIRD with static routes, rewritten by a script that checks targets
// once a second.
package main
