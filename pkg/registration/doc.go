// Package registration keeps a target registered at load balancers: it is the client of
// vipgate.target.v1.
//
// A [Registration] keeps one target registered at one load balancer. It registers the target,
// retries with back-off while the load balancer is unavailable, and deregisters when its owner
// leaves. It ends when the load balancer has reported the removal of the target.
//
// A [Group] keeps one target registered at every load balancer of a list of addresses and names:
//   - Each address has a separate registration and connection: a load balancer that hangs, is down
//     or rejects the target does not delay the registrations at other load balancers.
//   - A name is looked up every 5 s. The target is registered at each new address. It is
//     deregistered, with its drain time, at each address that is missing from three successful
//     answers, or from one if no registration exists there. A lookup that fails or returns no
//     address has no effect: an outage of DNS never ends a registration.
//   - A load balancer gets one registration, even if a name has addresses of both families: only
//     the family of the first answer is used, IPv4 if the name has both. An address of several
//     names is used once. Two configured addresses of the same load balancer compete, because the
//     newest call for a target takes it over. The older registration is superseded and not retried,
//     so that the two do not alternate.
//   - A rejection is retried, for example that the stream does not exist yet.
//   - When its owner leaves, the group deregisters the target at all load balancers concurrently
//     and ends with the longest drain.
//
// Every call, lookup and handshake has a deadline. All load balancers have the same SPIFFE ID,
// which the replicas of a Deployment share.
package registration
