// Package tick aligns work that is done periodically. An idle process wakes up for each timer, and
// waking up costs a multiple of what a timer is for: the threads of the runtime, and caches that
// other processes have used meanwhile. Timers that are due in the same instant cost one wake-up.
package tick
