// Package trench holds the configuration of a trench: the model, its strict YAML reader, and a
// watcher of the trench file and of the stale file, in which a writer reports that it cannot
// refresh the trench file.
//
// A [Config] returned by [Parse] or [Read] is complete (defaults are filled in), consistent
// (every VIP of a stream is a VIP of the attractor, VIPs do not overlap, names and addresses are
// unique where required) and immutable. Callers need not validate it again.
//
// The reader returns all problems of a rejected file as [Errors]: file, line, column, field and
// remedy.
//
// The reader does not check whether an interface, a password file or a gateway exists; the
// components that use them do.
package trench
