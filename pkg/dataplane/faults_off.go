//go:build !vipgate_faults

package dataplane

// fault does nothing in a build that is not for tests.
func fault(string) {}
