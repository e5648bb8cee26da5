// Package generated keeps the generated sections of documents.
package generated

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Begin returns the comment that begins a section.
func Begin(name string) string { return "<!-- begin " + name + " -->\n" }

// Section compares the section of a document between the comments <!-- begin NAME --> and
// <!-- end NAME --> with its expected content, and replaces it if update is true. The tests of two
// programs may do that at the same time.
func Section(file, name, content string, update bool) (err error) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("document: %w", err)
	}
	// Closing releases the lock as well.
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", file, err)
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("document: %w", err)
	}
	first, end := Begin(name), "<!-- end "+name+" -->"
	before, rest, ok := strings.Cut(string(data), first)
	if !ok {
		return fmt.Errorf("%s has no line %s", file, strings.TrimSpace(first))
	}
	old, after, ok := strings.Cut(rest, end)
	if !ok {
		return fmt.Errorf("%s has no line %s", file, end)
	}
	content = "\n" + strings.TrimSpace(content) + "\n\n"
	if old == content {
		return nil
	}
	if !update {
		return fmt.Errorf("%s: the section %q is stale: run make generate", file, name)
	}
	text := before + first + content + end + after
	if err := f.Truncate(int64(len(text))); err != nil {
		return fmt.Errorf("document: %w", err)
	}
	if _, err := f.WriteAt([]byte(text), 0); err != nil {
		return fmt.Errorf("document: %w", err)
	}
	return nil
}
