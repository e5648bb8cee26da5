// Command chaos injects random faults into a lab and checks which routes the gateways held
// during them.
//
// Its exit status is 0 only if no VIP was held longer than its bound, missing after everything
// was healed, or updated without a cause, and if nothing leaked. The faults are a pure function
// of the seed, which is printed first; their exact times depend on the machine. It leaves no
// namespace, process, mount or file except the evidence of a failure; the next run removes the
// remains of a killed one.
//
// Three parts share nothing but the topology: the schedule and the faults break things, the
// timeline records the state of each subject (from polls of processes and from the faults
// injected into targets and links), and the evaluation compares it with the updates that the
// gateways received. None of them shares code with the programs under test.
//
// It needs root, BIRD 2, FRR, nftables and iproute2.
package main
