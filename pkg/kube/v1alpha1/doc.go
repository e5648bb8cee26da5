// Package v1alpha1 holds the Trench, the object of Kubernetes that describes a trench, and the
// names of the labels and annotations that vipgate reads and writes.
//
// A Trench that was decoded is not validated: the API server does that with the schema of the
// CustomResourceDefinition, and the reader of the trench file with what becomes of it.
package v1alpha1
