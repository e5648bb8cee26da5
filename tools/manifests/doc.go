// Package manifests tests deployments and charts with the libraries of Kustomize and Helm: both
// render the same objects, whose fields Kubernetes knows, and the schema of the chart's values
// refuses what would only fail in a cluster.
package manifests
