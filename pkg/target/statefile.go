package target

import (
	"context"
	"log/slog"
	"time"
)

type stateFile struct {
	path   string
	log    *slog.Logger
	wanted chan struct{}
}

func newStateFile(path string, log *slog.Logger) *stateFile {
	return &stateFile{path: path, log: log, wanted: make(chan struct{}, 1)}
}
func (s *stateFile) run(ctx context.Context, snapshot func() []byte) { <-ctx.Done() }
func (s *stateFile) problems() []string                              { return nil }
func (r *Registry) snapshot() []byte                                 { return nil }
func (r *Registry) restore(now time.Time)                            {}
