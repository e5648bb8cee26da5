// Bench measures what vipgate does when something changes, beside the field's
// common technique in the same topology and run, and prints a table.
//
// Each row of the table is one claim with a goal. A measurement begins just
// before the cause and ends when a receiver in the gateway's place had read the
// message that carries the effect; both are read from the same monotonic clock.
// Nothing here fails by time: a missed goal is shown, and fails nothing. Only a
// row that could not be measured makes the exit status 1.
//
// The numbers are of the machine and of the load on it, so both are written
// beside them.
package main
