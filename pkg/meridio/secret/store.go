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
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("failed to create the directory of keys: %w", err)
		}
		// The directory may exist with a different mode.
		if err := os.Chmod(d, 0o700); err != nil {
			return fmt.Errorf("failed to restrict the directory of keys: %w", err)
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
	sources, err := entries(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, source := range sources {
		keys, wanted := want[source]
		if !wanted {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, source)))
			continue
		}
		names, err := entries(filepath.Join(dir, source))
		errs = append(errs, err)
		for _, name := range names {
			if !slices.ContainsFunc(keys, func(key string) bool { return key+suffix == name }) {
				errs = append(errs, os.RemoveAll(filepath.Join(dir, source, name)))
			}
		}
	}
	return errors.Join(errs...)
}

// entries returns the names in a directory; it is empty if the directory does not exist.
func entries(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
}
