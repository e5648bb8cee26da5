package readinessfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// scanRequest requests a scan of the directory or, if names is set, a check which names exist.
type scanRequest struct {
	names   map[string]struct{}
	settled bool // copied to the result
}

type scanResult struct {
	request  scanRequest
	begun    time.Time
	files    map[string]foundFile // valid files, by name
	problems []string
	link     bool  // the path is a symlink
	err      error // why the directory cannot be read
}

// foundFile is a readiness file.
type foundFile struct {
	file  string    // its canonical name
	mtime time.Time // zero unless scanner.times
	link  bool

	// Set by readLoop.aged.
	expires time.Time // when the file becomes stale; zero: never
	future  bool      // the mtime was in the future when it was first seen
}

// stale reports whether the file is too old to count.
func (f foundFile) stale(now time.Time) bool { return !f.expires.IsZero() && !now.Before(f.expires) }

// scanner performs all calls into the file system, which may hang. Its fields are owned by run.
type scanner struct {
	path     string
	times    bool              // mtimes are needed
	notifier *fsnotify.Watcher // nil: none
	before   func()
	log      *slog.Logger
	inode    os.FileInfo // of the watched directory
	watched  bool        // false while a logged failure to watch persists
}

// run answers requests until their channel is closed.
func (s *scanner) run(requests <-chan scanRequest, results chan<- scanResult) {
	for q := range requests {
		found := scanResult{request: q, begun: time.Now()}
		s.before()
		if q.names != nil {
			found.files = s.verify(q.names)
		} else {
			s.scan(&found)
		}
		results <- found // does not block: at most one request is outstanding
	}
	if s.notifier != nil {
		if err := s.notifier.Close(); err != nil {
			s.log.Warn("failed to close file notifications", "error", err)
		}
	}
}

// verify returns the subset of names that exist.
func (s *scanner) verify(names map[string]struct{}) map[string]foundFile {
	existing := map[string]foundFile{}
	for name := range names {
		if _, err := os.Lstat(filepath.Join(s.path, name)); !errors.Is(err, fs.ErrNotExist) {
			existing[name] = foundFile{}
		}
	}
	return existing
}

// scan reads the directory.
func (s *scanner) scan(found *scanResult) {
	if info, err := os.Lstat(s.path); err == nil {
		found.link = info.Mode()&fs.ModeSymlink != 0
	}
	// Watch before reading, so that no change between the two is missed. If the directory was replaced
	// in between, the watch is on another inode: repeat both.
	const attempts = 3
	for range attempts {
		s.watch()
		replaced, err := s.read(found)
		if replaced {
			continue
		}
		if err != nil {
			found.err = s.explain(err)
		}
		return
	}
	found.err = fmt.Errorf("the readiness directory %s is being replaced continuously", s.path)
}

// watch adds watches of the directory and its parent. An inotify watch belongs to an inode, so a
// replaced directory needs a new watch.
func (s *scanner) watch() {
	if s.notifier == nil {
		return
	}
	var problem error
	if err := s.notifier.Add(filepath.Dir(s.path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		problem = err
	}
	info, err := os.Stat(s.path)
	if s.inode != nil && (err != nil || !os.SameFile(info, s.inode)) {
		_ = s.notifier.Remove(s.path) // fails if the kernel has removed the watch already
		s.inode = nil
	}
	if err == nil {
		if err := s.notifier.Add(s.path); err == nil {
			s.inode = info
		} else if !errors.Is(err, fs.ErrNotExist) {
			problem = err
		}
	}
	if problem != nil && s.watched {
		s.log.Warn("readiness directory cannot be watched, polling only", "error", problem)
	}
	s.watched = problem == nil
}

// read reads the directory. replaced reports whether path no longer refers to the watched inode.
func (s *scanner) read(found *scanResult) (replaced bool, err error) {
	dir, err := os.OpenFile(s.path, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	info, err := dir.Stat()
	if err != nil || (s.inode != nil && !os.SameFile(info, s.inode)) {
		return err == nil, err
	}
	const batch = 1024
	found.files = map[string]foundFile{}
	for total := 0; ; {
		entries, err := dir.ReadDir(batch)
		for _, e := range entries {
			if total++; total > maxEntries {
				problem := fmt.Sprintf("%s has more than %d entries: the others are ignored", s.path, maxEntries)
				found.problems = append(found.problems, problem)
				return false, nil
			}
			if !isReadinessFile(e.Name()) {
				continue
			}
			file, problem := canonical(e.Name())
			f := foundFile{file: file}
			if problem == "" {
				problem = s.inspect(e, &f)
			}
			switch problem {
			case "":
				found.files[e.Name()] = f
			case vanished:
			default:
				found.problems = append(found.problems, fmt.Sprintf("%q: %s", e.Name(), problem))
			}
		}
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
}

// vanished marks a file that was removed between ReadDir and stat.
const vanished = "vanished"

// inspect sets the mtime and type of f. problem is the reason why the entry does not count.
func (s *scanner) inspect(e fs.DirEntry, f *foundFile) (problem string) {
	mode := e.Type()
	f.link = mode&fs.ModeSymlink != 0
	if mode.IsRegular() && !s.times {
		return ""
	}
	info, err := os.Stat(filepath.Join(s.path, e.Name()))
	switch {
	case errors.Is(err, fs.ErrNotExist) && f.link:
		return "is a symlink to a file that does not exist"
	case errors.Is(err, fs.ErrNotExist):
		return vanished
	case err != nil:
		return "cannot be inspected: " + err.Error()
	case !info.Mode().IsRegular():
		return "is not a regular file, nor a symlink to one"
	}
	f.mtime = info.ModTime()
	return ""
}

func (s *scanner) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the readiness directory %s does not exist: the writer of the files creates it: %w", s.path, err)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("the readiness directory %s is not a directory: %w", s.path, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to read the readiness directory %s: %w", s.path, err)
	}
	return fmt.Errorf("the readiness directory %s cannot be read: %w", s.path, err)
}
