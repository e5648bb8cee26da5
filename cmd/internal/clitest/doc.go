// Package clitest holds what the tests of lb's and frontend's command lines
// share: it reads the manifests in deployments/ and compares a container with
// the command line that it runs, and it writes the tables of flags in
// docs/configuration.md.
//
// It knows of Kubernetes what the manifests use, and judges nothing that
// Kubernetes itself would refuse.
package clitest
