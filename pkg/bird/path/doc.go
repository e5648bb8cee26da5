// Package path finds out how the pod reaches a gateway: the local address of the session, the address
// of an unnumbered gateway, and the first hop toward a gateway beyond routers.
package path
