// Package secret writes keys of Kubernetes Secrets to files.
//
// A [Watcher] watches each wanted Secret by its name, and needs only the verb watch. The keys are
// the passwords that Meridio's bgpAuth names. The package uses HTTP and JSON, because the core
// imports no Kubernetes modules. It guarantees:
//
//   - A key is written to its file (mode 0600, replaced atomically) when the API server sends it;
//     events are neither delayed nor merged.
//   - A file is removed only when the API server reports that the Secret or the key does not exist,
//     or when the key is no longer wanted. Files stay while the API server is unreachable, rejects
//     the request, or sends an invalid object, so that a restart needs no API server.
//   - External names are used in paths only after [Check].
//   - Values never appear in logs and errors.
//
// The reader of a file checks whether BIRD accepts the value as a password.
package secret
