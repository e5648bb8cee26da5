package healthcheck

import (
	"container/heap"
	"slices"
	"time"
)

// slot is when an item of a schedule is due, and its index there; -1 while it is in none.
type slot struct {
	due   time.Time
	index int
}

func (s *slot) at() *slot { return s }

// schedule is a heap for package container/heap: the item that is due first has index 0.
type schedule[T interface{ at() *slot }] []T

var _ heap.Interface = (*schedule[*entry])(nil)

func (s schedule[T]) Len() int           { return len(s) }
func (s schedule[T]) Less(i, j int) bool { return s[i].at().due.Before(s[j].at().due) }
func (s schedule[T]) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].at().index, s[j].at().index = i, j
}

func (s *schedule[T]) Push(x any) {
	x.(T).at().index = len(*s)
	*s = append(*s, x.(T))
}

func (s *schedule[T]) Pop() any {
	last := len(*s) - 1
	x := (*s)[last]
	x.at().index = -1
	*s = slices.Delete(*s, last, last+1) // which clears the element for the garbage collector
	return x
}
