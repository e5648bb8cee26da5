// Package turns decides when the sessions of BIRD's configuration change, so that an edit moves
// traffic away before it restarts or ends a session, and restarts one session of a family after
// another (docs/adr/0039-sessions-take-turns.md). It is pure.
package turns
