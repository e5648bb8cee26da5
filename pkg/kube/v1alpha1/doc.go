// Package v1alpha1 holds the Trench, the Kubernetes object that describes a trench, and the names
// of the labels and annotations that vipgate reads and writes.
//
// Decoding does not validate a Trench. The API server validates it with the schema of the
// CustomResourceDefinition, and the reader of the trench file validates its translation.
package v1alpha1
