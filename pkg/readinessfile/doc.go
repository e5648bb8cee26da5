// Package readinessfile reads and writes the readiness files of Meridio 2: empty files in a
// directory that exist while a stream (lb-ready-STREAM) or a VIP (lb-vip-ready-ADDRESS) is ready.
//
// [Reader] publishes a [Listing] for each change of the directory, and at least once a second. A
// removal takes effect immediately, new files after 10 ms without a further one. A listing older
// than [MaxListingAge] is ignored, and [DirectoryGonePolicy] applies while the directory cannot be
// read. A file system that hangs blocks no caller.
//
// [Writer] keeps the files of a directory equal to the desired ones.
package readinessfile
