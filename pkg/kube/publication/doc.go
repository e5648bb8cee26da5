// Package publication shows in the API server what the trench does with each object: the status of
// the Trench and its Services, the addresses of Ingresses and Gateways, and Events.
//
// Every pod records what its frontend advertises, a [Report], in the TrenchReport of its Pod. The
// leader of the trench, which holds a Lease, adds the reports up and applies status with the field
// manager [FieldManager]. What to write is a pure function of the newest objects. It is written
// only where the object differs, and only to the version of the object that was looked at. Two
// leaders for a moment can therefore not write by turns, and an Event goes with the one write that
// changed a condition. Nothing is removed when a leader stops or is lost.
//
// Addresses in status.loadBalancer are never cleared: clients such as external-dns delete names
// without addresses at once. They stay while the Service is refused (it serves what was accepted
// last, which a condition records), and while the source of spec.publish has none. A Service that
// was never accepted gets none.
//
// Limits: while the Trench is refused, its Services keep the status that they have. A pod of a lost
// node counts with its last report for up to 30 s. Two Trenches of different namespaces that
// publish for one class in a third namespace are not found: no Role allows to read both.
package publication
