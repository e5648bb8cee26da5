// Package secret writes keys of Kubernetes Secrets to files.
//
// A [Watcher] watches each wanted Secret by its name, with nothing but the verb watch, over HTTP
// and JSON: the frontend's password files come from Meridio's bgpAuth, and the core imports no
// Kubernetes modules. It guarantees:
//
//   - A key is in its file (mode 0600, replaced atomically) as soon as the API server sent it;
//     events are neither delayed nor merged.
//   - A file is removed only when the API server said that the Secret or the key does not exist, or
//     when the key is wanted no longer. While the API server cannot be reached, rejects the request
//     or sends what is not a Secret, the files stay: a restart needs no API server.
//   - Names from outside become paths only after [Check].
//   - Values appear in no log and in no error.
//
// Whether a value is a password that BIRD accepts is decided where the file is read.
package secret
