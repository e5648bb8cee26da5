// Package translation translates Kubernetes objects into the trench file.
//
// [Translate] is pure: the same objects, in any order, result in the same bytes in every pod of
// the trench. The trench reader accepts every file that it returns. For invalid objects it
// returns no file, and the previous one stays in force.
package translation
