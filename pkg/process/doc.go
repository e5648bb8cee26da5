// Package process is the shell of the long-running programs: it opens the listeners that every
// program has, runs the tasks, and stops them in stages when the program receives a signal.
//
// Each stage has [task.StopTimeout] to end. The error names a task that exceeds it: a hung call
// cannot keep the process alive. [health.Server.Alive] names a task that hangs before the stop.
package process
