// Command chaos breaks a lab in random ways and has an observer judge what
// the gateways held meanwhile.
//
// It guarantees that its exit status is 0 only if no VIP was held longer than its
// bound, missed after everything was healed, or was spoken of without a reason,
// and if nothing leaked. What is done to the lab is a pure function of the
// seed, which is printed first; when it hits is the machine's. It leaves no
// namespace, process, mount or file behind but the evidence of a failure; what a
// killed run left is removed by the next one.
//
// Three parts share nothing but the topology: the schedule and the faults break
// things, the timeline records what is true (from looks at processes and from
// what was done to targets and wires), and the verdict compares it with what the
// gateways heard. None of them shares code with what is judged.
//
// It needs root, BIRD 2, FRR, nftables and iproute2.
package main
