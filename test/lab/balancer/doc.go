// Package balancer is a load balancer without targets that reports the decisions of its owner:
// it has the real table and service on a pod's real socket, with a real identity. It runs in the
// process of its owner, so that the time of a decision is known on the owner's clock.
//
// It is not part of package lab, since it uses packages of the product.
package balancer
