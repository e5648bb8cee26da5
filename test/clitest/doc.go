// Package clitest is the test kit for the command lines of lb and frontend. It reads the manifests
// in deployments/, compares a container with the command line that the container runs, and writes
// the tables of flags in docs/configuration.md.
//
// It parses the parts of Kubernetes objects that the manifests use, and does not repeat the
// validation of the API server.
package clitest
