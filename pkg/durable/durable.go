// Package durable keeps small JSON documents in files that survive a crash whole.
package durable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

const (
	// maxSize is the largest state file that is read: far more than
	// DefaultRegistryTargets registrations need.
	maxSize = 256 << 20
	// temporarySuffix is that of a file that is being written.
	temporarySuffix = ".tmp"
)

// ErrBroken is wrapped when a file was read and its content is corrupt.
var ErrBroken = errors.New("is a corrupt state file")

// Write replaces a file so that after a crash there is the old one or the
// new one, whole. Its directory is created when missing. One goroutine at a time may
// write a file.
func Write(path string, content any) (err error) {
	data, err := json.MarshalIndent(content, "", " ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	tmp, err := os.OpenFile(path+temporarySuffix, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = tmp.Write(append(data, '\n'))
	if err == nil {
		err = tmp.Sync()
	}
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(tmp.Name())))
	}
	// The new name is on the disk only once the directory is.
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Read reads what Write wrote, with the time of its last stamp. No
// file is no error: found is false. The error wraps ErrBroken when the content is
// not what it should be.
func Read(path string, content any) (stamped time.Time, found bool, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, false, nil
	} else if err != nil {
		return time.Time{}, false, fmt.Errorf("read state: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return time.Time{}, false, fmt.Errorf("read state: %w", err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	switch {
	case err != nil:
		return time.Time{}, false, fmt.Errorf("read state: %w", err)
	case len(data) > maxSize:
		return time.Time{}, true, fmt.Errorf("%s %w: it has more than %d bytes", path, ErrBroken, maxSize)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(content); err != nil {
		return time.Time{}, true, fmt.Errorf("%s %w: %w", path, ErrBroken, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return time.Time{}, true, fmt.Errorf("%s %w: something follows its end", path, ErrBroken)
	}
	return info.ModTime(), true, nil
}

// SetAside moves a corrupt file aside, for a person to look at.
func SetAside(path string, why error, now time.Time, log *slog.Logger) {
	aside := path + ".broken-" + now.UTC().Format("20060102T150405.000Z")
	if err := os.Rename(path, aside); err != nil {
		log.Error("a state file is broken and will be overwritten: what it held is lost", "file", path, "error", errors.Join(why, err))
		return
	}
	log.Error("a state file is broken and was moved aside: what it held is lost", "file", path, "moved_to", aside, "error", why)
}
