// Package latest passes state between goroutines so that the newest value wins.
//
// A [Value] has one writer and any number of readers; a slow reader misses intermediate values,
// never the last one, and never delays the writer.
package latest
