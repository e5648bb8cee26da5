package dataplane

// maglev divides size entries among names, as in section 3.4 of the Maglev paper
// (Eisenbud et al., NSDI 2016). The result depends on the set of names, on size and
// on seed only: it holds indices into names, which must be sorted. size is prime; nil for no names.
func maglev(names []string, size, seed uint32) []uint16 { return nil }
