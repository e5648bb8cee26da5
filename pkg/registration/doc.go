// Package registration keeps a target registered at load balancers: it is the client of
// vipgate.target.v1.
//
// A [Registration] keeps one target registered at one load balancer. It registers, again with
// back-off while the load balancer is unavailable, and deregisters when its owner leaves, which
// ends once the load balancer reported the removal of the target.
//
// A [Group] keeps one target registered at every load balancer of a list of addresses and names:
//   - Each address has a registration and a connection of its own: a load balancer that hangs, is
//     down or rejects the target delays nothing at the others.
//   - A name is looked up every 5 s. The target is registered at each address that appears, and
//     deregistered, with its drain, at each one that a successful answer lacks. A lookup that fails
//     or returns no address changes nothing: an outage of DNS never ends a registration.
//   - A load balancer is registered with once, also where a name has addresses of both families:
//     of a name counts only the family of its first answer, IPv4 if it has both. An address of
//     several names counts once. Two addresses of one load balancer that are written by the user
//     compete, since a newer call of the same name takes the target: the older registration is
//     superseded, and is not tried again, so that the two do not alternate.
//   - A rejection, such as of a stream that the load balancer does not have yet, is retried.
//   - When its owner leaves, it deregisters at all load balancers at once and ends with the longest
//     drain.
//
// Every call, lookup and handshake has a deadline. Load balancers are authenticated by one SPIFFE
// ID, which all replicas of a Deployment share.
package registration
