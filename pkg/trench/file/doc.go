// Package file reads and writes the trench file: a strict YAML reader, a writer, and a watcher of
// the trench file and of the stale file, in which a writer reports that it cannot refresh the
// trench file.
//
// The reader returns all problems of a rejected file as [Errors]: file, line, column, field and
// remedy. It does not check whether an interface, a password file or a gateway exists; the
// components that use them do.
package file
