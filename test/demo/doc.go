// Command demo shows vipgate in network namespaces, with the gateway's routing table as the
// evidence of every step.
//
// It guarantees that its exit status is 0 only if every step held, and that it leaves no namespace,
// process or file behind; what a killed run left is removed by the next one. It needs root, BIRD 2
// and iproute2. How the lab is built is the matter of test/lab.
package main
