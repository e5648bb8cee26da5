// Package birds runs the tests of pkg/bird with each supported version of BIRD. It is a separate
// package so that they run concurrently with the tests against Debian's BIRD.
package birds
