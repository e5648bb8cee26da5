package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
)

// store writes a value to the file at path unless the content is equal, and reports whether it did.
func store(path string, value []byte) (changed bool, err error) {
	before, err := files.Read(path, maxEvent)
	if err == nil && bytes.Equal(before, value) {
		return false, nil
	}
	// Replacing the file also repairs read errors, such as a file that is too large.
	if err := privateDir(filepath.Dir(path)); err != nil {
		return false, err
	}
	return true, durable.Replace(path, value, 0o600)
}

// privateDir creates dir and its parent, the directory of keys, with access for the owner only.
func privateDir(dir string) error {
	for _, path := range []string{filepath.Dir(dir), dir} {
		// The directory may exist with a different mode.
		if err := errors.Join(os.MkdirAll(path, 0o700), os.Chmod(path, 0o700)); err != nil {
			return fmt.Errorf("failed to create the directory of keys: %w", err)
		}
	}
	return nil
}

// remove removes the file at path and reports whether it existed.
func remove(path string) (existed bool, err error) {
	err = os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("failed to remove a key: %w", err)
	}
	return true, nil
}

// prune removes all entries of the directory of keys except the files of the wanted keys.
func prune(dir string, want map[string][]string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) || path == dir:
			return nil
		case err != nil:
			return err
		}
		source := entry.Name()
		keep := want[source] != nil // of a directory of keys
		if parent := filepath.Dir(path); parent != dir {
			source = filepath.Base(parent)
			keep = slices.ContainsFunc(want[source], func(key string) bool { return key+suffix == entry.Name() })
		}
		if keep {
			return nil
		}
		if err := os.RemoveAll(path); err != nil || !entry.IsDir() {
			return err
		}
		return fs.SkipDir
	})
}

const (
	// keysDir is the directory of the files below Options.Dir.
	keysDir = "keys"
	// suffix ends each file name, so that the temporary file of a key (".tmp") cannot be the file
	// of a different key.
	suffix = ".key"
	// noFile is the name of a file that never exists: the name of a Secret cannot begin with a dot.
	noFile = ".invalid"

	// maxName is the maximum length of the name of a Secret in Kubernetes. maxKey follows from the
	// limit of 255 bytes for file names in Linux, less 8 for the suffixes of the file and its
	// temporary file.
	maxName = 253
	maxKey  = 255 - len(suffix) - len(".tmp")
)

var (
	// namePattern matches a DNS subdomain (RFC 1123), the format of Kubernetes object names.
	namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	keyPattern  = regexp.MustCompile(`^[-._a-zA-Z0-9]+$`)
)

// Check returns an error unless source is a valid name of a Secret and key a valid key.
func Check(source, key string) error {
	switch {
	case len(source) > maxName || !namePattern.MatchString(source):
		return fmt.Errorf("%s is not the name of a Secret; use at most %d lower-case letters, digits, dashes and dots",
			quote(source), maxName)
	case len(key) > maxKey || !keyPattern.MatchString(key) || key == "." || strings.HasPrefix(key, ".."):
		return fmt.Errorf("%s is not a key of a Secret; use at most %d letters, digits, -, _ and ., not .. at the start",
			quote(key), maxKey)
	}
	return nil
}

// CheckNamespace returns an error unless name is a valid name of a namespace.
func CheckNamespace(name string) error {
	if len(name) > 63 || strings.Contains(name, ".") || !namePattern.MatchString(name) {
		return fmt.Errorf("--namespace=%s: write the namespace of the pod, at most 63 lower-case letters, digits and -",
			quote(name))
	}
	return nil
}

// maxQuoted is the maximum length of external text in errors.
const maxQuoted = 300

// quote quotes and truncates external text for an error, and escapes control characters.
func quote(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q...", s[:maxQuoted])
	}
	return fmt.Sprintf("%q", s)
}

// File returns the path of the file of a key. The file may not exist yet; it never exists for
// names that [Check] refuses.
func (w *Watcher) File(source, key string) string {
	if Check(source, key) != nil {
		return filepath.Join(w.dir, noFile)
	}
	// Each Secret has a directory: both names may contain dots, so a joined name would be
	// ambiguous, and could exceed the limit for file names.
	return filepath.Join(w.dir, source, key+suffix)
}
