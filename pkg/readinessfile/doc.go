// Package readinessfile reads and writes the readiness files of Meridio 2: empty files in a
// directory that exist while a stream (lb-ready-STREAM) or a VIP (lb-vip-ready-ADDRESS) is ready.
//
// [Reader] publishes a [Listing] for each change of the directory, and at least once a second. A
// removed file counts at once, new files are collected for 10 ms, a listing older than
// [MaxListingAge] counts for nothing, and [DirectoryGonePolicy] decides what happens while the
// directory cannot be read. A file system that hangs blocks no caller.
//
// [Writer] keeps the files of a directory equal to the desired ones.
package readinessfile
