// Package logs creates the logger of a process: its level can change at run time, and no line waits
// for the output.
package logs
