// Package cluster follows the objects of an API server that the trench file depends on.
package cluster
