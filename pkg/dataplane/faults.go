package dataplane

// Steps of a change, between which a process may end; see [FaultSteps].
const (
	stepPlanned   = "planned"
	stepWays      = "ways"
	stepWritten   = "written"
	stepForgotten = "forgotten"
	stepUnrouted  = "unrouted"
	stepReadBack  = "read-back"
	stepPublished = "published"
)

// FaultSteps are the steps after which a process that was built with the tag
// vipgate_faults can be made to kill itself, in their order: VIPGATE_FAULT=STEP, or
// STEP:N for the N-th time.
//
//   - planned: the kernel is as before
//   - ways: rules and routes of new targets are installed
//   - written: the nftables transaction is done
//   - forgotten: connection-tracking entries of removed targets are gone
//   - unrouted: rules and routes of removed targets are gone
//   - read-back: all was read back
//   - published: the state says so
func FaultSteps() []string {
	return []string{stepPlanned, stepWays, stepWritten, stepForgotten, stepUnrouted, stepReadBack, stepPublished}
}
