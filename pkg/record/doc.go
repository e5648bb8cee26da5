// Package record writes down what the data plane puts into the kernel, before it
// does.
package record
