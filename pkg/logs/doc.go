// Package logs makes the logger of a process and lets its level change while it
// runs. What is logged, and with which attributes, is everybody's own matter.
package logs
