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

	"golang.org/x/sys/unix"
)

const (
	// maxSize is the size limit of a state file; DefaultRegistryTargets registrations need far less.
	maxSize = 256 << 20
	// temporarySuffix is the suffix of the temporary file before the rename.
	temporarySuffix = ".tmp"
)

// ErrCorrupt is wrapped by errors about corrupt content.
var ErrCorrupt = errors.New("is a corrupt state file")

// Write replaces a JSON file atomically, with mode 0600. It creates a missing directory.
func Write(path string, content any) error {
	data, err := json.MarshalIndent(content, "", " ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		return fmt.Errorf("failed to write %s: %w", path, err)
	}
	return Replace(path, append(data, '\n'), 0o600)
}

// Replace writes a file atomically: a reader never sees partial content, and after a crash or on a
// full disk either the old or the new content is complete. A file must not have concurrent writers,
// in this process or in another.
func Replace(path string, content []byte, mode fs.FileMode) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("failed to write %s: %w", path, err)
		}
	}()
	// The temporary file is in the same directory, because a rename between file systems is not
	// atomic. A file that a killed process left is removed, not reused: another process may have it
	// open, or its mode may let other users read the content.
	if err := unix.Unlink(path + temporarySuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("failed to remove %s: %w", path+temporarySuffix, err)
	}
	tmp, err := os.OpenFile(path+temporarySuffix, os.O_CREATE|os.O_WRONLY|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	if err = tmp.Chmod(mode); err == nil { // the umask may have removed bits
		_, err = tmp.Write(content)
	}
	if err == nil {
		err = tmp.Sync()
	}
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	// The rename is durable only once the directory is synced.
	file, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// ReadPrivate reads a secret that Write wrote. It rejects symbolic links and files that another
// user owns or may open. found is false, without an error, if the file does not exist. The error
// wraps ErrCorrupt if the content is corrupt.
func ReadPrivate(path string, content any) (found bool, err error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return true, fmt.Errorf("failed to read %s: %w", path, err)
	}
	defer file.Close()
	// fstat instead of stat: the file at path may have been replaced after open.
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		return true, fmt.Errorf("failed to read %s: %w", path, err)
	}
	switch mode := stat.Mode & 0o7777; {
	case stat.Mode&unix.S_IFMT != unix.S_IFREG:
		return true, fmt.Errorf("%s is not a regular file", path)
	case int(stat.Uid) != os.Geteuid():
		return true, fmt.Errorf("%s belongs to user %d, not to user %d of this process", path, stat.Uid, os.Geteuid())
	case mode&0o077 != 0:
		return true, fmt.Errorf("%s has mode %#o, with which other users may open it, instead of 0600", path, mode)
	case stat.Size > maxSize:
		return true, fmt.Errorf("%s %w: it is larger than %d bytes", path, ErrCorrupt, maxSize)
	}
	data, err := io.ReadAll(io.LimitReader(file, maxSize))
	if err != nil {
		return true, fmt.Errorf("failed to read %s: %w", path, err)
	}
	return true, decode(path, data, content)
}

// Read reads a file that Write wrote, and its modification time. found is false, without an error,
// if the file does not exist. The error wraps ErrCorrupt if the content is corrupt.
func Read(path string, content any) (stamped time.Time, found bool, err error) {
	// Without O_NONBLOCK the open of a FIFO would wait for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, false, nil
	}
	if err != nil {
		return time.Time{}, false, fmt.Errorf("failed to read %s: %w", path, err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("it is not a regular file (%s)", info.Mode().Type())
	}
	if err == nil && info.Size() > maxSize {
		return time.Time{}, true, fmt.Errorf("%s %w: it is larger than %d bytes", path, ErrCorrupt, maxSize)
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(file, maxSize))
	}
	if err != nil {
		return time.Time{}, false, fmt.Errorf("failed to read %s: %w", path, err)
	}
	if err := decode(path, data, content); err != nil {
		return time.Time{}, true, err
	}
	return info.ModTime(), true, nil
}

// decode decodes the content of a file and rejects unknown fields and trailing data.
func decode(path string, data []byte, content any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(content); err != nil {
		return fmt.Errorf("%s %w: %w", path, ErrCorrupt, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s %w: trailing data", path, ErrCorrupt)
	}
	return nil
}

// SetAside renames a corrupt file, so that an operator can inspect it.
func SetAside(path string, why error, now time.Time, log *slog.Logger) {
	aside := path + ".broken-" + now.UTC().Format("20060102T150405.000Z")
	if err := os.Rename(path, aside); err != nil {
		log.Error("corrupt state file will be overwritten, its content is lost", "file", path, "error", errors.Join(why, err))
		return
	}
	log.Error("corrupt state file moved aside, its content is lost", "file", path, "moved_to", aside, "error", why)
}

// Duration is a non-negative duration that is stored as text, such as "1m30s".
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (duration Duration) MarshalText() ([]byte, error) {
	return []byte(time.Duration(duration).String()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (duration *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err == nil && parsed < 0 {
		err = fmt.Errorf("%s is negative", text)
	}
	*duration = Duration(parsed)
	return err
}
