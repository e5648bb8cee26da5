// Package health serves grpc.health.v1 for a process: one service for each
// thing that must be true, conjunctions of them, and one for each VIP.
//
// A [Server] guarantees that
//   - a conjunction changes together with its parts, never a moment later;
//   - "" answers as [Readiness], for probes that name no service;
//   - a service that is not known is NOT_FOUND for Check and SERVICE_UNKNOWN
//     for Watch, which continues and follows it once it is known;
//   - a slow reader of Watch misses intermediate states, never the last one, and
//     never delays the process;
//   - `vip/<prefix>` answers Check and Watch and stays out of List, which readers
//     of grpc-go cut off at 100 services; ten thousand VIPs cost a map entry each.
//
// It leaves to others what is true, and which listener serves it.
package health
