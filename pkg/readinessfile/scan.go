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

type foundFile struct {
	file  string    // its canonical name
	mtime time.Time // zero unless scanner.times
	link  bool

	// Set by readLoop.aged.
	expires time.Time // when the file becomes stale; zero: never
	future  bool      // the mtime was in the future when it was first seen
}

// stale reports whether the file is too old to count.
func (file foundFile) stale(now time.Time) bool {
	return !file.expires.IsZero() && !now.Before(file.expires)
}

// scanner performs all calls into the file system, which may hang. Its fields are owned by run.
type scanner struct {
	path     string
	times    bool              // mtimes are needed
	most     int               // files
	notifier *fsnotify.Watcher // nil: none
	before   func()
	log      *slog.Logger
	inode    os.FileInfo // of the watched directory
	watched  bool        // false while a logged failure to watch persists
}

// run answers requests until their channel is closed.
func (scanner *scanner) run(requests <-chan scanRequest, results chan<- scanResult) {
	for request := range requests {
		found := scanResult{request: request, begun: time.Now()}
		scanner.before()
		if request.names != nil {
			found.files = scanner.verify(request.names)
		} else {
			scanner.scan(&found)
		}
		results <- found // does not block: at most one request is outstanding
	}
	if scanner.notifier != nil {
		if err := scanner.notifier.Close(); err != nil {
			scanner.log.Warn("failed to close file notifications", "error", err)
		}
	}
}

// verify returns the subset of names that exist.
func (scanner *scanner) verify(names map[string]struct{}) map[string]foundFile {
	existing := map[string]foundFile{}
	for name := range names {
		if _, err := os.Lstat(filepath.Join(scanner.path, name)); !errors.Is(err, fs.ErrNotExist) {
			existing[name] = foundFile{}
		}
	}
	return existing
}

func (scanner *scanner) scan(found *scanResult) {
	if info, err := os.Lstat(scanner.path); err == nil {
		found.link = info.Mode()&fs.ModeSymlink != 0
	}
	// Watch before reading, so that no change between the two is missed. If the directory was replaced
	// in between, the watch is on another inode: repeat both.
	const attempts = 3
	for range attempts {
		scanner.watch()
		replaced, err := scanner.read(found)
		if replaced {
			continue
		}
		if err != nil {
			found.err = scanner.explain(err)
		}
		return
	}
	found.err = fmt.Errorf("the readiness directory %s is being replaced continuously", scanner.path)
}

// watch adds watches of the directory and its parent. An inotify watch belongs to an inode, so a
// replaced directory needs a new watch.
func (scanner *scanner) watch() {
	if scanner.notifier == nil {
		return
	}
	var problem error
	if err := scanner.notifier.Add(filepath.Dir(scanner.path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		problem = err
	}
	info, err := os.Stat(scanner.path)
	if scanner.inode != nil && (err != nil || !os.SameFile(info, scanner.inode)) {
		_ = scanner.notifier.Remove(scanner.path) // fails if the kernel has removed the watch already
		scanner.inode = nil
	}
	if err == nil {
		if err := scanner.notifier.Add(scanner.path); err == nil {
			scanner.inode = info
		} else if !errors.Is(err, fs.ErrNotExist) {
			problem = err
		}
	}
	if problem != nil && scanner.watched {
		scanner.log.Warn("readiness directory cannot be watched, polling only", "error", problem)
	}
	scanner.watched = problem == nil
}

// read reads the directory. replaced reports whether path no longer refers to the watched inode.
func (scanner *scanner) read(found *scanResult) (replaced bool, err error) {
	dir, err := os.OpenFile(scanner.path, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	info, err := dir.Stat()
	// A replaced directory must not be read with the watch of the old one.
	if err != nil || (scanner.inode != nil && !os.SameFile(info, scanner.inode)) {
		return err == nil, err
	}
	const batch = 1024
	found.files = map[string]foundFile{}
	for {
		entries, err := dir.ReadDir(batch)
		for _, entry := range entries {
			if !isReadinessFile(entry.Name()) {
				continue
			}
			if len(found.files)+len(found.problems) == scanner.most {
				return false, fmt.Errorf("it has more than %d readiness files; remove those of no VIP", scanner.most)
			}
			file, problem := canonical(entry.Name())
			seen := foundFile{file: file}
			if problem == "" {
				problem = scanner.inspect(entry, &seen)
			}
			switch problem {
			case "":
				found.files[entry.Name()] = seen
			// A file that was removed during the read is a normal change.
			case vanished:
			default:
				found.problems = append(found.problems, fmt.Sprintf("%q: %s", entry.Name(), problem))
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
func (scanner *scanner) inspect(entry fs.DirEntry, found *foundFile) (problem string) {
	mode := entry.Type()
	found.link = mode&fs.ModeSymlink != 0
	if mode.IsRegular() && !scanner.times {
		return ""
	}
	info, err := os.Stat(filepath.Join(scanner.path, entry.Name()))
	switch {
	case errors.Is(err, fs.ErrNotExist) && found.link:
		return "is a symlink to a file that does not exist"
	case errors.Is(err, fs.ErrNotExist):
		return vanished
	case err != nil:
		return "cannot be inspected: " + err.Error()
	case !info.Mode().IsRegular():
		return "is not a regular file, nor a symlink to one"
	}
	found.mtime = info.ModTime()
	return ""
}

func (scanner *scanner) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the readiness directory %s does not exist: the writer of the files creates it: %w",
			scanner.path, err)
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("the readiness directory %s is not a directory: %w", scanner.path, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to read the readiness directory %s: %w", scanner.path, err)
	}
	return fmt.Errorf("the readiness directory %s cannot be read: %w", scanner.path, err)
}
