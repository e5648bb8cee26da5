// Package trench holds the configuration of a trench: the model, its strict YAML reader, and the
// watcher of its file and of the stale file, by which a writer says that it cannot refresh it.
//
// A [Config] that came from [Parse] or [Read] is complete (defaults filled in), consistent (every
// VIP of a stream is one of the attractor, no two VIPs overlap, no name or address appears twice
// where it must not), and never changes. A reader of a Config need not validate it again.
//
// What the reader refuses it reports completely, as [Errors]: file, line, column, field, and what
// to write instead.
//
// Whether an interface, a password file or a gateway exists is for those who use them to find out.
package trench
