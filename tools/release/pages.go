package main

import (
	"github.com/goreleaser/nfpm/v2/files"
)

// writePages is replaced below.
func (r *release) writePages() error { return nil }

func (r *release) pageContents() files.Contents { return nil }
