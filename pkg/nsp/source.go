package nsp

import (
	"context"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
)

// Source follows the attractor at the NSP. It implements task.Task.
type Source struct {
	o      Options
	loaded latest.Value[trench.Loaded]
	stale  latest.Value[*trench.Stale]
}

// NewSource returns a source.
func NewSource(o Options) *Source {
	s := &Source{o: o}
	s.loaded.Set(trench.Loaded{Config: &trench.Config{}})
	return s
}

// Value returns the configuration in force.
func (s *Source) Value() *latest.Value[trench.Loaded] { return &s.loaded }

// Stale returns why the configuration in force may be old.
func (s *Source) Stale() *latest.Value[*trench.Stale] { return &s.stale }

// String names the task.
func (s *Source) String() string { return "nsp-source" }

// Run follows the attractor until ctx ends.
func (s *Source) Run(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}
