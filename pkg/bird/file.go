package bird

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// temporarySuffix is that of a file which is being written, in the same
// directory, so that it can be moved into place.
const temporarySuffix = ".tmp"

// replaceFile writes a file and moves it into place, so that nobody ever reads
// half of it and a full disk leaves the old one. What a killed run left half
// written is overwritten: it may hold secrets.
func replaceFile(path string, content []byte, mode fs.FileMode) (err error) {
	tmp, err := os.OpenFile(path+temporarySuffix, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(tmp.Name())))
		}
	}()
	// Before the content: an older file may have let others read it.
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

// ensureFile is replaceFile unless the file holds the content already, so that
// a disk that can no longer be written to does not matter.
func ensureFile(path string, content []byte, mode fs.FileMode) error {
	if b, err := os.ReadFile(path); err == nil && bytes.Equal(b, content) {
		return nil
	}
	return replaceFile(path, content, mode)
}
