// Package registrytest serves registries as lb does, over real sockets and mTLS.
package registrytest
