// Package birds runs the tests of pkg/bird with each version of BIRD that is supported. It is a
// package of its own so that they run beside those with Debian's BIRD.
package birds
