package dataplane

// Steps of a change, between which a process may end; see [FaultSteps].
const (
	stepPlanned   = "planned"
	stepRoutes    = "routes"
	stepWritten   = "written"
	stepFlushed   = "flushed"
	stepUnrouted  = "unrouted"
	stepReadBack  = "read-back"
	stepPublished = "published"
)

// FaultSteps are the steps after which a process that was built with the tag
// vipgate_faults kills itself on demand, in their order: VIPGATE_FAULT=STEP, or
// STEP:N for the N-th time.
//
//   - planned: the kernel is as before
//   - routes: rules and routes of new targets are installed
//   - written: the nftables transaction is done
//   - flushed: connection tracking entries of removed targets are deleted
//   - unrouted: rules and routes of removed targets are gone
//   - read-back: everything was read back
//   - published: the state is published
func FaultSteps() []string {
	return []string{stepPlanned, stepRoutes, stepWritten, stepFlushed, stepUnrouted, stepReadBack, stepPublished}
}
