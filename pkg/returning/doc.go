// Package returning has the marks by which a target returns packets of flows that it does not know
// to the trench pod that sent them, so that the pod can ask another target.
//
// A pod marks a packet of which it cannot know the flow with [Ask] in the Differentiated Services
// field (RFC 2474). A target without the flow returns it to the link-layer address of its sender,
// with [Back] added, and never returns a packet with Back: none circulates between a target and a
// pod that does not know the marks. docs/adr/0045-flows-of-other-pods.md has the reasons.
package returning
