package record

import (
	"errors"
	"fmt"

	"go.etcd.io/bbolt"
)

// index knows of all records what their uniqueness and the summary need.
type index struct {
	targets map[uint32]indexed
	numbers map[identity]uint32
	streams map[string]uint64 // the checksums
	summary summary
}

// identity is which target of which stream.
type identity struct{ stream, name string }

type indexed struct {
	identity
	checksum uint64
}

func newIndex() index {
	return index{targets: make(map[uint32]indexed), numbers: make(map[identity]uint32), streams: make(map[string]uint64)}
}

// addTarget adds a target that is new.
func (x *index) addTarget(t Target, checksum uint64) error {
	id := identity{t.Stream, t.Name}
	if other, there := x.numbers[id]; there {
		return fmt.Errorf("target %s of stream %s has the number %d as well", t.Name, t.Stream, other)
	}
	x.numbers[id] = t.Number
	x.targets[t.Number] = indexed{id, checksum}
	x.summary.targets++
	x.summary.sum += checksum
	return nil
}

// addStream adds a stream that is new.
func (x *index) addStream(name string, checksum uint64) {
	x.streams[name] = checksum
	x.summary.streams++
	x.summary.sum += checksum
}

func (x *index) removeTarget(number uint32) {
	if was, there := x.targets[number]; there {
		delete(x.targets, number)
		delete(x.numbers, was.identity)
		x.summary.targets--
		x.summary.sum -= was.checksum
	}
}

func (x *index) removeStream(name string) {
	if checksum, there := x.streams[name]; there {
		delete(x.streams, name)
		x.summary.streams--
		x.summary.sum -= checksum
	}
}

// plan is a change that keeps the rules, ready to be written.
type plan struct {
	removeTargets []uint32
	removeStreams []string
	targets       []Target
	streams       []Stream
	encoded       [][]byte // of targets, then of streams
	summary       summary  // afterwards
}

func (p plan) empty() bool {
	return len(p.removeTargets)+len(p.removeStreams)+len(p.targets)+len(p.streams) == 0
}

// plan checks a change and encodes it.
func (x *index) plan(c Change) (plan, error) {
	p := plan{targets: c.Targets, streams: c.Streams, summary: x.summary}
	var errs []error

	// What is written anew or removed gives its identity back first.
	gone := make(map[uint32]bool, len(c.RemoveTargets)+len(c.Targets))
	leave := func(number uint32) {
		if was, there := x.targets[number]; there && !gone[number] {
			gone[number] = true
			p.summary.targets--
			p.summary.sum -= was.checksum
		}
	}
	for _, number := range c.RemoveTargets {
		leave(number)
	}
	for number := range gone {
		p.removeTargets = append(p.removeTargets, number)
	}
	for _, t := range c.Targets {
		leave(t.Number)
	}
	numbers, names := make(map[uint32]bool, len(c.Targets)), make(map[identity]bool, len(c.Targets))
	for _, t := range c.Targets {
		id := identity{t.Stream, t.Name}
		other, there := x.numbers[id]
		switch err := t.check(); {
		case err != nil:
			errs = append(errs, fmt.Errorf("target %q of stream %q, number %d: %w", t.Name, t.Stream, t.Number, err))
		case numbers[t.Number]:
			errs = append(errs, fmt.Errorf("number %d is in the change twice", t.Number))
		case names[id]:
			errs = append(errs, fmt.Errorf("target %s of stream %s is in the change twice", t.Name, t.Stream))
		case there && !gone[other]:
			errs = append(errs, fmt.Errorf("target %s of stream %s has the number %d, and cannot have %d as well", t.Name, t.Stream, other, t.Number))
		}
		numbers[t.Number], names[id] = true, true
		b := encodeTarget(t)
		p.encoded = append(p.encoded, b)
		p.summary.targets++
		p.summary.sum += checksumOf(b)
	}

	left := make(map[string]bool, len(c.RemoveStreams)+len(c.Streams))
	leaveStream := func(name string) {
		if checksum, there := x.streams[name]; there && !left[name] {
			left[name] = true
			p.summary.streams--
			p.summary.sum -= checksum
		}
	}
	for _, name := range c.RemoveStreams {
		leaveStream(name)
	}
	for name := range left {
		p.removeStreams = append(p.removeStreams, name)
	}
	written := make(map[string]bool, len(c.Streams))
	for _, s := range c.Streams {
		leaveStream(s.Name)
		if err := s.check(); err != nil {
			errs = append(errs, fmt.Errorf("stream %q: %w", s.Name, err))
		} else if written[s.Name] {
			errs = append(errs, fmt.Errorf("stream %s is in the change twice", s.Name))
		}
		written[s.Name] = true
		b := encodeStream(s)
		p.encoded = append(p.encoded, b)
		p.summary.streams++
		p.summary.sum += checksumOf(b)
	}
	return p, errors.Join(errs...)
}

// write writes the plan in a transaction.
func (p plan) write(tx *bbolt.Tx) error {
	targets, streams := tx.Bucket([]byte(targetKind)), tx.Bucket([]byte(streamKind))
	var errs []error
	for _, number := range p.removeTargets {
		errs = append(errs, targets.Delete(targetKey(number)))
	}
	for _, name := range p.removeStreams {
		errs = append(errs, streams.Delete([]byte(name)))
	}
	for i, t := range p.targets {
		errs = append(errs, targets.Put(targetKey(t.Number), p.encoded[i]))
	}
	for i, s := range p.streams {
		errs = append(errs, streams.Put([]byte(s.Name), p.encoded[len(p.targets)+i]))
	}
	errs = append(errs, p.summary.write(tx))
	return errors.Join(errs...)
}

// write writes the summary as the transaction's own.
func (s summary) write(tx *bbolt.Tx) error {
	s.transaction = uint64(tx.ID())
	return tx.Bucket([]byte(summaryKind)).Put(summaryKey, s.encode())
}

// apply takes over a plan that was written.
func (x *index) apply(p plan) {
	for _, number := range p.removeTargets {
		x.removeTarget(number)
	}
	for _, name := range p.removeStreams {
		x.removeStream(name)
	}
	for _, t := range p.targets {
		x.removeTarget(t.Number) // its identity may be another's now
	}
	for i, t := range p.targets {
		x.numbers[identity{t.Stream, t.Name}] = t.Number
		x.targets[t.Number] = indexed{identity{t.Stream, t.Name}, checksumOf(p.encoded[i])}
	}
	for i, s := range p.streams {
		x.streams[s.Name] = checksumOf(p.encoded[len(p.targets)+i])
	}
	x.summary = p.summary
}
