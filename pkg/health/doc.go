// Package health serves grpc.health.v1 for a process: one service per condition, conjunctions of
// conditions, and one service per VIP.
//
// A [Server] guarantees:
//   - A conjunction changes together with its parts.
//   - "" has the state of [Readiness], for probes without a service name. After
//     [Server.RegisterForContainer] it has the state of [Liveness].
//   - For an unknown service, Check returns NOT_FOUND. Watch sends SERVICE_UNKNOWN, and follows
//     the service after its first Set.
//   - A slow reader of Watch misses intermediate states, but not the last one, and does not delay
//     the process.
//   - `vip/<prefix>` supports Check and Watch, which read the state on demand. List omits it,
//     because grpc-go truncates the list at 100 services.
package health
