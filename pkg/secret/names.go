package secret

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	// keysDir is the directory of the files below Options.Dir.
	keysDir = "keys"
	// suffix ends the name of each file, so that the temporary file of one key (".tmp") never is the
	// file of another.
	suffix = ".key"
	// noFile is the name of a file that never exists: no Secret's name begins with a dot.
	noFile = ".invalid"

	// maxName bounds the name of a Secret and of a key in Kubernetes; a file name of Linux has 255
	// bytes, of which the suffixes of a key's file and of its temporary file take 8.
	maxName = 253
	maxKey  = 255 - len(suffix) - len(".tmp")
)

var (
	// namePattern matches a DNS subdomain (RFC 1123), as Kubernetes names objects.
	namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	keyPattern  = regexp.MustCompile(`^[-._a-zA-Z0-9]+$`)
)

// Check returns an error unless source can be the name of a Secret and key the name of a key in it.
func Check(source, key string) error {
	switch {
	case len(source) > maxName || !namePattern.MatchString(source):
		return fmt.Errorf("%s is not the name of a Secret; use at most %d lower-case letters, digits, dashes and dots",
			quote(source), maxName)
	case len(key) > maxKey || !keyPattern.MatchString(key) || key == "." || strings.HasPrefix(key, ".."):
		return fmt.Errorf("%s is not a key of a Secret; use at most %d letters, digits, -, _ and ., not .. at the start",
			quote(key), maxKey)
	}
	return nil
}

// CheckNamespace returns an error unless name can be the name of a namespace.
func CheckNamespace(name string) error {
	if len(name) > 63 || strings.Contains(name, ".") || !namePattern.MatchString(name) {
		return fmt.Errorf("--namespace=%s: write the namespace of the pod, at most 63 lower-case letters, digits and -",
			quote(name))
	}
	return nil
}

// maxQuoted bounds text of other processes in errors.
const maxQuoted = 300

// quote returns text of another process for an error: bounded, without control characters.
func quote(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q...", s[:maxQuoted])
	}
	return fmt.Sprintf("%q", s)
}

// File returns the path of the file of a key, which may not exist (yet). For names that [Check]
// refuses it is a file that never exists.
func (w *Watcher) File(source, key string) string {
	if Check(source, key) != nil {
		return filepath.Join(w.dir, noFile)
	}
	// A directory for each Secret: both names may contain dots, and together they may exceed the
	// length of a file name.
	return filepath.Join(w.dir, source, key+suffix)
}
