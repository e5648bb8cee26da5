// Package pods asks the pods of a trench on behalf of an operator: in Kubernetes by exec through
// the API server with the operator's permissions, on other machines by the admin sockets.
//
// No pod is left out: a pod with a program that does not answer is listed with the reason. Every
// pod is asked at the same time, within bounds, and each call of [List] has a deadline.
package pods
