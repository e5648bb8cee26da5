package kube

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// fileMode gives the group read access, because lb and frontend may run as a different user.
	fileMode fs.FileMode = 0o640
	dirMode  fs.FileMode = 0o750
	// keyMode is stricter: only frontend reads key files, and it runs as the user of kube.
	keyMode fs.FileMode = 0o600

	// maxCause is the maximum length of a cause in bytes, far below the limit of the file's readers.
	maxCause = 1000
)

// files writes the trench file, the key files and the stale file, which lb and frontend read.
type files struct {
	trench string
	keyDir string // has key files only: any unnamed file in it is removed

	said  cluster.Failure // the last failure written to the stale file
	known bool            // the stale file on disk is up to date
	since time.Time       // start time in the stale file; zero if the file does not exist
}

func (f *files) exists() bool {
	_, err := os.Stat(f.trench)
	return err == nil
}

// write updates the files that differ from the disk. Key files are written before the trench file
// that names them, and removed after the trench file that no longer does.
func (f *files) write(r translation.Result) (wrote bool, err error) {
	replace := func(path string, content []byte, mode fs.FileMode) error {
		// Readers watch the files, and an equal content would wake them.
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
			return nil
		}
		wrote = true
		return durable.Replace(path, content, mode)
	}
	if len(r.Keys) > 0 {
		if err := os.MkdirAll(f.keyDir, dirMode); err != nil {
			return false, fmt.Errorf("failed to create the directory of key files: %w", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Keys)) {
		// A name with a slash would write outside of the directory.
		if filepath.Base(name) != name {
			return wrote, fmt.Errorf("key file %q: not the name of a file", name)
		}
		if err := replace(filepath.Join(f.keyDir, name), r.Keys[name], keyMode); err != nil {
			return wrote, err
		}
	}
	if err := replace(f.trench, r.File, fileMode); err != nil {
		return wrote, err
	}
	removed, err := f.removeKeys(r)
	return wrote || removed, err
}

// removeKeys removes the key files that no gateway names. A missing Secret may be created again.
func (f *files) removeKeys(r translation.Result) (removed bool, err error) {
	entries, err := os.ReadDir(f.keyDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("failed to list key files: %w", err)
	}
	var errs []error
	for _, e := range entries {
		// A directory may be a mount, and is never a key file.
		_, named := r.Keys[e.Name()]
		named = named || r.Config != nil && slices.ContainsFunc(r.Config.Attractor.Gateways,
			func(gateway trench.Gateway) bool { return filepath.Base(gateway.PasswordFile) == e.Name() })
		if named || !e.Type().IsRegular() {
			continue
		}
		removed = true
		if err := os.Remove(filepath.Join(f.keyDir, e.Name())); err != nil {
			errs = append(errs, fmt.Errorf("failed to remove a key file: %w", err))
		}
	}
	return removed, errors.Join(errs...)
}

// stale writes the stale file, with the time and cause since which the trench file may be
// outdated, or removes it when all caches are current. A process that starts while the API server
// is unreachable keeps the start time of an existing stale file.
func (f *files) stale(s cluster.State) error {
	// Until the first snapshot, nothing proves that the trench file is current.
	starting := s.Synced.IsZero()
	if f.said == s.Stale && (f.known || starting) || starting && s.Stale.Since.IsZero() {
		return nil
	}
	path := f.trench + trench.StaleSuffix
	if s.Stale.Since.IsZero() {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("failed to remove %s: %w", path, err)
		}
		f.since = time.Time{}
	} else {
		if f.since.IsZero() {
			f.since = s.Stale.Since
			if old, err := os.ReadFile(path); starting && err == nil {
				since, _, _ := strings.Cut(string(old), " ")
				if t, err := time.Parse(time.RFC3339, since); err == nil {
					f.since = t
				}
			}
		}
		// The format is one line: replace line breaks of the cause.
		cause := strings.Join(strings.Fields(s.Stale.Cause), " ")
		if len(cause) > maxCause {
			cause = strings.ToValidUTF8(cause[:maxCause], "")
		}
		line := fmt.Sprintf("%s %s\n", f.since.UTC().Format(time.RFC3339), cause)
		if err := durable.Replace(path, []byte(line), fileMode); err != nil {
			return err
		}
	}
	f.known, f.said = !starting || f.known, s.Stale
	return nil
}
