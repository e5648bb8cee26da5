// Package publication publishes the state of a trench in the API server: the status of the Trench
// and its Services, the addresses of Ingresses and Gateways, and Events.
//
// Every pod writes the VIPs that its frontend advertises, a [Report], to the TrenchReport of its
// Pod. The leader of the trench, which holds a Lease, aggregates the reports and applies status
// with the field manager fieldManager. The desired status is a pure function of the newest objects.
// It is written only if the object differs, and only to the evaluated resource version. Two
// concurrent leaders can therefore not overwrite each other in turns, and an Event is sent only by
// the leader whose write changed a condition. A leader that stops or fails removes no status.
//
// Addresses in status.loadBalancer are never cleared, because clients such as external-dns delete
// names without addresses immediately. They stay while the Service is refused (it keeps its last
// accepted stream, which a condition records), and while the source of spec.publish has no
// address. A Service that was never accepted has no addresses.
//
// Limits: while the Trench is refused, its Services keep their status. The last report of a pod
// on a lost node counts for up to 30 s. Two Trenches of different namespaces that publish for one
// class in a third namespace are not detected, because no Role grants read access to both.
package publication
