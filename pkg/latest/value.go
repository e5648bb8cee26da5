package latest

import (
	"context"
	"sync"
)

// Value holds the newest value and notifies readers of changes. The zero Value holds the zero T and
// is ready for use. A Value must not be copied.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed chan struct{}
}

// New returns a Value that holds x.
func New[T any](x T) *Value[T] { return &Value[T]{value: x} }

// Set replaces the value and wakes every reader.
func (v *Value[T]) Set(x T) { v.Update(func(T) T { return x }) }

// Update replaces the value with f's result, atomically, and wakes every reader. f must not block.
func (v *Value[T]) Update(f func(T) T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.value = f(v.value)
	if v.changed != nil {
		close(v.changed)
		v.changed = nil
	}
}

// Load returns the value.
func (v *Value[T]) Load() T {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value
}

// Get returns the value and a channel that is closed when the value is replaced.
func (v *Value[T]) Get() (T, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.changed == nil {
		v.changed = make(chan struct{})
	}
	return v.value, v.changed
}

// Wait waits until done reports true for a value, or ctx ends.
func (v *Value[T]) Wait(ctx context.Context, done func(T) bool) error {
	for {
		x, changed := v.Get()
		if done(x) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Wake puts a token into a channel of size 1, unless it holds one. It never blocks.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
