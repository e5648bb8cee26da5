// Package meridiotest serves the load balancer's side of a Meridio 1.2.8 trench pod:
// loadbalancer.v1.StreamAvailabilityService on a unix socket. Program meridio-lb is the same as a
// process, to be stopped and killed.
package meridiotest
