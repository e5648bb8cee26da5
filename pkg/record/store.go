package record

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bberrors "go.etcd.io/bbolt/errors"
)

const (
	fileName = "dataplane.db"
	// newSuffix is that of a file that is being made.
	newSuffix = ".new"
	// damagedSuffix and a time are behind the name of a file that was moved aside.
	damagedSuffix = ".damaged-"
	// keepDamaged is how many of those are kept.
	keepDamaged = 3
	// mapped is how much of the address space is reserved, so that the file is mapped
	// anew only when it is larger.
	mapped = 16 << 20
)

var (
	// ErrLocked is wrapped when another process has the records open.
	ErrLocked = errors.New("another process has them")

	errClosed = errors.New("they are closed")
	errFault  = errors.New("the file was changed or cannot be read")
)

// Store keeps records in a file. It is safe for concurrent use.
type Store struct {
	path string
	lock *lock

	mu sync.Mutex
	db *bbolt.DB
	// ix is what db holds.
	ix index
	// unusable says why nothing more can be done.
	unusable error
}

// Damage is what was found when the records could not be read.
type Damage struct {
	// Path is where the damaged file was moved to.
	Path string
	// Err is what was wrong with it.
	Err error
}

// Open opens the records in a directory, which must be there, or begins new ones. Of
// a file that is torn or corrupt, or of a newer version, it returns what was damaged,
// with an empty Store in its place; of those files the last three are kept. It waits
// two seconds for another process to leave the records: the error then wraps
// [ErrLocked].
func Open(dir string, log *slog.Logger) (_ *Store, _ *Damage, err error) {
	s := &Store{path: filepath.Join(dir, fileName)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the records %s: %w", s.path, err), s.close())
			switch {
			case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
				err = fmt.Errorf("%w: let this process read and write the directory and the files in it", err)
			case errors.Is(err, fs.ErrNotExist):
				err = fmt.Errorf("%w: make the directory", err)
			}
		}
	}()
	if s.lock, err = takeLock(filepath.Join(dir, lockName)); err != nil {
		return nil, nil, err
	}
	var damage *Damage
	err = s.survey()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = s.begin()
	case errors.As(err, new(*brokenError)):
		if damage, err = s.setAside(err, time.Now(), log); err == nil {
			err = s.begin()
		}
	}
	if err != nil {
		return nil, nil, err
	}
	if err = guarded(func() (err error) { s.db, err = openFile(s.path); return err }); err != nil {
		return nil, nil, err
	}
	return s, damage, nil
}

// brokenError is about a file that makes no sense.
type brokenError struct{ why error }

func (e *brokenError) Error() string { return e.why.Error() }
func (e *brokenError) Unwrap() error { return e.why }

// survey looks at the file before bbolt does, and fills in the index.
func (s *Store) survey() error {
	data, err := readFile(s.path)
	if err != nil {
		return err
	}
	c := newCollector()
	if err := surveyFile(data, c); err != nil {
		return &brokenError{err}
	}
	s.ix = c.index
	return nil
}

// begin makes a new file. It has its name only once it is whole.
func (s *Store) begin() error {
	s.ix = newIndex()
	path := s.path + newSuffix
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := openFile(path)
	if err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(path)))
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, kind := range kinds {
			if _, err := tx.CreateBucket([]byte(kind)); err != nil {
				return err
			}
		}
		return s.ix.summary.write(tx)
	})
	if err = errors.Join(err, db.Close()); err == nil {
		err = os.Rename(path, s.path)
	}
	if err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(path)))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// openFile gives a file that is not there, or was surveyed, to bbolt.
//
// NoSync: what is written down is lost with the machine, as is the state of the kernel
// that it is about. A process that is killed loses nothing, since what write(2) took is
// the kernel's, and the order of writes stays: a transaction's pages go to pages that
// are free, and its meta page, which makes them count, last. A page of the file is
// written by one write(2), which a signal does not interrupt.
//
// NoGrowSync: the file grows by being written to, and never has holes, which would
// take space when they are read, in a memory file system that is full.
//
// The list of free pages is kept in the file (NoFreelistSync is off), since the survey
// compares it.
func openFile(path string) (*bbolt.DB, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: lockTimeout, NoSync: true, NoGrowSync: true, InitialMmapSize: mapped, PageSize: pageSize,
		OpenFile: openPlain, NoStatistics: true,
	})
	if errors.Is(err, bberrors.ErrTimeout) { // a tool of bbolt, since we have our lock
		err = fmt.Errorf("%w: end it first", ErrLocked)
	}
	return db, err
}

// setAside moves a file that makes no sense out of the way, for a person to look at.
func (s *Store) setAside(why error, now time.Time, log *slog.Logger) (*Damage, error) {
	d := &Damage{Path: s.path + damagedSuffix + now.UTC().Format("20060102T150405.000000Z"), Err: fmt.Errorf("%s: %w", s.path, why)}
	if err := os.Rename(s.path, d.Path); err != nil {
		return nil, errors.Join(d.Err, err)
	}
	old, err := filepath.Glob(s.path + damagedSuffix + "*")
	slices.Sort(old) // by time
	for _, path := range old[:max(0, len(old)-keepDamaged)] {
		err = errors.Join(err, os.Remove(path))
	}
	if err != nil {
		log.Warn("old damaged records cannot be removed", "error", err)
	}
	return d, nil
}

// Load returns everything that is written down. It is the caller's.
func (s *Store) Load() (Records, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all Records
	if err := s.do("read", func() error {
		return s.db.View(func(tx *bbolt.Tx) error {
			c := newCollector()
			err := tx.ForEach(func(kind []byte, b *bbolt.Bucket) error {
				if err := c.begin(kind); err != nil {
					return err
				}
				return b.ForEach(func(key, value []byte) error { return c.add(kind, key, value) })
			})
			if err != nil {
				return err
			}
			all, err = c.end(uint64(tx.ID()))
			return err
		})
	}); err != nil {
		return Records{}, err
	}
	return all, nil
}

// Write does one transaction: what is removed is removed first, and what is there
// already is replaced. Removing what is not there is no error. When it returns an error
// nothing was written; that of a full disk wraps syscall.ENOSPC, and the next Write may
// be better. A change that breaks the rules of records is refused.
func (s *Store) Write(c Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, err := s.ix.plan(c)
	if err != nil {
		return fmt.Errorf("write the records %s: %w", s.path, err)
	}
	if p.empty() {
		return nil
	}
	if err := s.do("write", func() error { return s.db.Update(p.write) }); err != nil {
		return err
	}
	s.ix.apply(p)
	return nil
}

// do does something with the file. After a fault nothing more can be done: bbolt may
// hold locks that nobody gives back.
func (s *Store) do(what string, f func() error) error {
	err := s.unusable
	if err == nil && s.db == nil {
		err = errClosed
	}
	if err == nil {
		err = guarded(f)
	}
	if errors.Is(err, errFault) && s.unusable == nil {
		s.unusable = fmt.Errorf("%w; start the program again, which moves it aside if it is damaged", err)
		err = s.unusable
	}
	if err != nil {
		return fmt.Errorf("%s the records %s: %w", what, s.path, err)
	}
	return nil
}

// guarded turns into an error what would end the process: bbolt's panics, and the
// signal for a mapped page that the file no longer has.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", errFault, p)
		}
	}()
	return f()
}

// Close closes the file. Closing twice is no error.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.close(); err != nil {
		return fmt.Errorf("close the records %s: %w", s.path, err)
	}
	return nil
}

// Remove removes the files and closes the store.
func (s *Store) Remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return fmt.Errorf("remove the records %s: %w", s.path, errClosed)
	}
	// While the lock is held nobody else begins new ones.
	err := errors.Join(ignoreMissing(os.Remove(s.path)), ignoreMissing(os.Remove(s.path+newSuffix)), ignoreMissing(os.Remove(s.lock.file.Name())))
	if err = errors.Join(err, s.close()); err != nil {
		return fmt.Errorf("remove the records %s: %w", s.path, err)
	}
	return nil
}

// close closes what is open. A database after a fault stays as it is, since closing it
// would wait for its locks for ever.
func (s *Store) close() error {
	var err error
	if s.db != nil && s.unusable == nil {
		err = guarded(s.db.Close)
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.release())
	}
	s.db, s.lock = nil, nil
	return err
}

// readFile reads a whole file of at most maxFile bytes.
func readFile(path string) ([]byte, error) {
	f, err := openPlain(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxFile || info.Size() > math.MaxInt {
		return nil, &brokenError{fmt.Errorf("it has %d bytes, more than %d", info.Size(), maxFile)}
	}
	data := make([]byte, info.Size())
	if _, err := f.ReadAt(data, 0); err != nil {
		return nil, &brokenError{err}
	}
	return data, nil
}
