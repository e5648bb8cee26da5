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
	// suffix ends each file name, so that the temporary file of a key (".tmp") cannot be the file
	// of a different key.
	suffix = ".key"
	// noFile is the name of a file that never exists: the name of a Secret cannot begin with a dot.
	noFile = ".invalid"

	// maxName is the maximum length of the name of a Secret in Kubernetes. maxKey follows from the
	// limit of 255 bytes for file names in Linux, less 8 for the suffixes of the file and its
	// temporary file.
	maxName = 253
	maxKey  = 255 - len(suffix) - len(".tmp")
)

var (
	// namePattern matches a DNS subdomain (RFC 1123), the format of Kubernetes object names.
	namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	keyPattern  = regexp.MustCompile(`^[-._a-zA-Z0-9]+$`)
)

// Check returns an error unless source is a valid name of a Secret and key a valid key.
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

// CheckNamespace returns an error unless name is a valid name of a namespace.
func CheckNamespace(name string) error {
	if len(name) > 63 || strings.Contains(name, ".") || !namePattern.MatchString(name) {
		return fmt.Errorf("--namespace=%s: write the namespace of the pod, at most 63 lower-case letters, digits and -",
			quote(name))
	}
	return nil
}

// maxQuoted is the maximum length of external text in errors.
const maxQuoted = 300

// quote quotes and truncates external text for an error, and escapes control characters.
func quote(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q...", s[:maxQuoted])
	}
	return fmt.Sprintf("%q", s)
}

// File returns the path of the file of a key. The file may not exist yet; it never exists for
// names that [Check] refuses.
func (w *Watcher) File(source, key string) string {
	if Check(source, key) != nil {
		return filepath.Join(w.dir, noFile)
	}
	// Each Secret has a directory: both names may contain dots, so a joined name would be
	// ambiguous, and could exceed the limit for file names.
	return filepath.Join(w.dir, source, key+suffix)
}
