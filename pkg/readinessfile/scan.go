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

// scanRequest asks for a look at the whole directory or, with names, at these.
type scanRequest struct {
	names   map[string]struct{}
	settled bool // handed back
}

// sight is what was found.
type scanResult struct {
	request scanRequest
	begun   time.Time
	// files are those with the name of a readiness file that may count, by name.
	files    map[string]foundFile
	problems []string
	// link says that the path is a symlink.
	link bool
	// err is why the directory cannot be read.
	err error
}

// foundFile is one file.
type foundFile struct {
	name fileName
	// mtime is zero unless it is wanted.
	mtime time.Time
	link  bool
}

// scanner does all that touches the file system and so may hang with it. Its
// fields belong to run.
type scanner struct {
	path     string
	times    bool              // mtimes are wanted
	notifier *fsnotify.Watcher // nil: none
	before   func()
	log      *slog.Logger
	inode    os.FileInfo // of the watch
	watched  bool        // no failure to watch was reported yet, or it is over
}

// run answers requests until there are no more.
func (s *scanner) run(requests <-chan scanRequest, results chan<- scanResult) {
	for q := range requests {
		found := scanResult{request: q, begun: time.Now()}
		s.before()
		if q.names != nil {
			found.files = s.verify(q.names)
		} else {
			s.scan(&found)
		}
		results <- found // there is room: one request at a time
	}
	if s.notifier == nil {
		return
	}
	if err := s.notifier.Close(); err != nil {
		s.log.Warn("closing the file notifications", "error", err)
	}
}

// verify returns those of the names that exist.
func (s *scanner) verify(names map[string]struct{}) map[string]foundFile {
	there := map[string]foundFile{}
	for name := range names {
		if _, err := os.Lstat(filepath.Join(s.path, name)); !errors.Is(err, fs.ErrNotExist) {
			there[name] = foundFile{}
		}
	}
	return there
}

// scan looks at the whole directory.
func (s *scanner) scan(found *scanResult) {
	if info, err := os.Lstat(s.path); err == nil {
		found.link = info.Mode()&fs.ModeSymlink != 0
	}
	// The directory is watched before it is read, and what is read is what is
	// watched: otherwise it was replaced in between, and we look again.
	const attempts = 3
	for range attempts {
		s.watch()
		dir, err := os.OpenFile(s.path, os.O_RDONLY|syscall.O_DIRECTORY, 0)
		if err != nil {
			found.err = s.explain(err)
			return
		}
		info, err := dir.Stat()
		if err == nil && s.notifier != nil && s.inode != nil && !os.SameFile(info, s.inode) {
			_ = dir.Close()
			continue
		}
		if err == nil {
			err = s.read(dir, found)
		}
		_ = dir.Close()
		if err != nil {
			found.err = s.explain(err)
		}
		return
	}
	found.err = fmt.Errorf("the readiness directory %s is being replaced all the time", s.path)
}

// watch makes the notifications tell of the directory that the path leads to now,
// and of what happens to its name. A watch is one of an inode: one that was
// replaced is watched again.
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
		// The kernel may have ended it already.
		_ = s.notifier.Remove(s.path)
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
		s.log.Warn("the readiness directory cannot be watched, polling only", "error", problem)
	}
	s.watched = problem == nil
}

func (s *scanner) read(dir *os.File, found *scanResult) error {
	const batch = 1024
	found.files = map[string]foundFile{}
	for total := 0; ; {
		entries, err := dir.ReadDir(batch)
		for _, e := range entries {
			if total++; total > maxEntries {
				found.problems = append(found.problems, fmt.Sprintf("%s has more than %d entries: the others are not looked at",
					s.path, maxEntries))
				return nil
			}
			n, isReadinessFile, problem := parseName(e.Name())
			if !isReadinessFile {
				continue
			}
			f := foundFile{name: n}
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
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// vanished is what look says of a file that was removed meanwhile.
const vanished = "vanished"

// inspect reports whether an entry may count, and fills in the rest.
func (s *scanner) inspect(e fs.DirEntry, f *foundFile) (problem string) {
	mode := e.Type()
	f.link = mode&fs.ModeSymlink != 0
	if mode.IsRegular() && !s.times {
		return ""
	}
	info, err := os.Stat(filepath.Join(s.path, e.Name()))
	switch {
	case errors.Is(err, fs.ErrNotExist) && f.link:
		return "is a symlink that leads nowhere"
	case errors.Is(err, fs.ErrNotExist):
		return vanished
	case err != nil:
		return "cannot be looked at: " + err.Error()
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
