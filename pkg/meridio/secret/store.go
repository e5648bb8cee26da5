package secret

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/files"
)

// store writes a value to the file at path unless the content is equal, and reports whether it
// changed the file.
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
