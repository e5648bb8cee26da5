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

// store writes a value to the file at path unless it has that content, and reports whether it
// changed the file.
func store(path string, value []byte) (changed bool, err error) {
	before, err := files.Read(path, maxEvent)
	if err == nil && bytes.Equal(before, value) {
		return false, nil
	}
	// Any other error, such as a file that is too large, is repaired by the replacement.
	if err := privateDir(filepath.Dir(path)); err != nil {
		return false, err
	}
	return true, durable.Replace(path, value, 0o600)
}

// privateDir creates a directory in the directory of keys, and that, for the owner only.
func privateDir(dir string) error {
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("failed to create the directory of keys: %w", err)
		}
		// It may exist with another mode.
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

// prune removes everything in the directory of keys but the files of the wanted keys.
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

// entries returns the names in a directory, none if it does not exist.
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
