package bird

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// temporarySuffix is the suffix of a file that is being written. It is in the directory of the
// final file, so that a rename is atomic.
const temporarySuffix = ".tmp"

// replaceFile writes a file atomically: a reader never sees a part of it, and a full disk leaves
// the old file. A temporary file of a killed run is overwritten, since it may hold secrets.
func replaceFile(path string, content []byte, mode fs.FileMode) (err error) {
	tmp, err := os.OpenFile(path+temporarySuffix, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return fmt.Errorf("failed to write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("failed to write %s: %w", path, errors.Join(err, os.Remove(tmp.Name())))
		}
	}()
	// Before the content: the mode of a temporary file that exists may let other users read it.
	err = tmp.Chmod(mode)
	if err == nil {
		_, err = tmp.Write(content)
	}
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// ensureFile is replaceFile unless the file holds the content already, so that a restart of BIRD
// works on a full or read-only disk.
func ensureFile(path string, content []byte, mode fs.FileMode) error {
	if b, err := os.ReadFile(path); err == nil && bytes.Equal(b, content) {
		return nil
	}
	return replaceFile(path, content, mode)
}
