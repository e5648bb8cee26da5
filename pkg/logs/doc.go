// Package logs creates the logger of a process, whose level can change at run time.
package logs
