// Package task runs the concurrent parts of a process.
//
// A [Task] is one part with an owner. [Run] starts tasks together, turns a
// panic into an error, cancels the others when one fails, and returns only
// after every one of them has ended. What a task does and whether it retries is
// its own matter.
package task
