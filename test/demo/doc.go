// Command demo shows vipgate in network namespaces, with the gateway's routing table as the
// evidence of every step.
//
// Its exit status is 0 only if every step held. It leaves no namespace, process or file; the
// next run removes the remains of a killed one. It needs root, BIRD 2 and iproute2. Package lab
// builds the topology.
package main
