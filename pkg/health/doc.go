// Package health serves grpc.health.v1 for a process: one service per condition, conjunctions of
// conditions, and one service per VIP.
//
// A [Server] guarantees:
//   - A conjunction changes together with its parts.
//   - "" has the state of [Readiness], for probes without a service name; that of [Liveness] after
//     [Server.RegisterForContainer].
//   - An unknown service is NOT_FOUND for Check and SERVICE_UNKNOWN for Watch, which follows it
//     once it is known.
//   - A slow reader of Watch misses intermediate states, but not the last one, and does not delay
//     the process.
//   - `vip/<prefix>` supports Check and Watch and is not in List, which grpc-go truncates at 100
//     services; its state is read when it is asked for.
package health
