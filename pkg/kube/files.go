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
	// fileMode lets the group read: lb and frontend may run as other users.
	fileMode fs.FileMode = 0o640
	dirMode  fs.FileMode = 0o750

	// maxCause is how many bytes of a cause are written, far below what readers of the file take.
	maxCause = 1000
)

// files are what lb and frontend read.
type files struct {
	trench string
	keyDir string // has key files only: others are removed

	said  cluster.Failure // by the stale file
	known bool            // said is what the disk has
	since time.Time       // of the stale file; zero: there is none
}

// exists reports whether there is a trench file.
func (f *files) exists() bool {
	_, err := os.Stat(f.trench)
	return err == nil
}

// write writes what differs from the disk: the key files that the trench file names before it, and
// it removes those that it no longer names after it.
func (f *files) write(r translation.Result) (wrote bool, err error) {
	replace := func(path string, content []byte) error {
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
			return nil
		}
		wrote = true
		return durable.Replace(path, content, fileMode)
	}
	if len(r.Keys) > 0 {
		if err := os.MkdirAll(f.keyDir, dirMode); err != nil {
			return false, fmt.Errorf("failed to create the directory of key files: %w", err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Keys)) {
		if filepath.Base(name) != name {
			return wrote, fmt.Errorf("key file %q: not the name of a file", name)
		}
		if err := replace(filepath.Join(f.keyDir, name), r.Keys[name]); err != nil {
			return wrote, err
		}
	}
	if err := replace(f.trench, r.File); err != nil {
		return wrote, err
	}
	removed, err := f.removeKeys(r.Keys)
	return wrote || removed, err
}

// removeKeys removes key files that are not among those to keep.
func (f *files) removeKeys(keep map[string][]byte) (removed bool, err error) {
	entries, err := os.ReadDir(f.keyDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("failed to list key files: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if _, named := keep[e.Name()]; named || !e.Type().IsRegular() {
			continue
		}
		removed = true
		if err := os.Remove(filepath.Join(f.keyDir, e.Name())); err != nil {
			errs = append(errs, fmt.Errorf("failed to remove a key file: %w", err))
		}
	}
	return removed, errors.Join(errs...)
}

// stale writes since when and why the trench file may be old, or removes that file once all is
// current. A process that starts while the API server is away continues the time of the file that
// it finds.
func (f *files) stale(s cluster.State) error {
	starting := s.Synced.IsZero()
	if f.said == s.Stale && (f.known || starting) {
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
		// A line break would begin another line.
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
