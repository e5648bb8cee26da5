// Package record writes down what the data plane puts into the kernel, before it
// does, so that a process that was killed at any instant is followed by one that
// knows what may be there.
//
// A [Store] keeps [Target] and [Stream] records in the file dataplane.db of a
// directory, and has the lock dataplane.lock beside it while it is open. It
// guarantees:
//
//   - A [Change] is written whole or not at all, also when the process is killed
//     while it writes (SIGKILL), when the disk is full, and when writing fails for
//     another reason. What an earlier Write returned nil for is then still there.
//   - [Open] returns a Store with exactly what was written, or a [Damage]: a file that
//     was truncated, changed, is of a newer version or no such file at all is moved
//     aside and an empty one put in its place. Neither a file's content nor what
//     happens to it afterwards makes the process crash.
//   - What is read is as it was written and fit to be used: numbers and names are
//     unique, addresses are such, numbers are within their bounds. Write refuses what
//     is not.
//   - One process at a time has a directory's records.
//
// It does not guarantee that anything survives the end of the machine: writes are not
// synced, since what is written down, the state of the kernel, does not survive it
// either. A file that was torn by that is a damaged one.
//
// What is in the kernel, what to do about a Damage, and when to try again what failed
// is for those who use it.
package record
