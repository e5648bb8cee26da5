// Bench measures the reaction of vipgate to changes and compares it with the field's common
// technique in the same topology and run, and prints a table.
//
// Each row of the table is one claim with a goal. A measurement begins just before the cause and
// ends when a receiver in the gateway's place has read the message that carries the effect; both
// times are read from the same monotonic clock. No measurement fails by time: a missed goal is
// shown, and the exit status is 1 only if a row could not be measured.
//
// The numbers depend on the machine and its load, so the table includes both.
package main
