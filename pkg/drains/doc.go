// Package drains keeps the drains that operators order across restarts of a program.
package drains
