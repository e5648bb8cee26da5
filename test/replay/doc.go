// Replay injects the causes of public incidents into two trench pods with two gateways.
// It measures two numbers for each VIP: black-hole seconds, in which a gateway holds a route to the
// VIP and requests through that gateway fail; and dark seconds, in which no gateway holds a route
// although targets of the VIP serve.
//
// Clients of each gateway send requests to each VIP; the gateways' BIRD logs every update. The
// numbers follow from these records and share no code with vipgate. The reference is the common
// pattern in place of vipgate: BIRD with static routes, rewritten by a script that checks targets
// once a second.
package main
