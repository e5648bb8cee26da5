// Package tick aligns periodic work. An idle process wakes up for each timer, and a wake-up costs
// several times as much CPU as the timer's work: it starts threads of the runtime and refills CPU
// caches that other processes evicted. Timers that expire at the same instant share one wake-up.
package tick
