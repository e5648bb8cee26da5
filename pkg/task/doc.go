// Package task runs the concurrent parts of a process.
//
// [Run] starts tasks together, turns a panic into an error, cancels the other tasks when one fails,
// and returns after all of them have ended. Each task implements its own retries.
package task
