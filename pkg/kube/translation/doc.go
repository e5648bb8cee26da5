// Package translation turns objects of Kubernetes into the trench file.
//
// [Translate] is pure: the same objects give the same bytes in every pod of the trench, in whatever
// order they are listed. The file that it returns is one that the trench reader accepts; when the
// objects do not make one, there is no file, and the previous one stays in force.
package translation
