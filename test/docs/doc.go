// Package docs tests the documents: every name in them exists, every name that exists is
// documented, and the commands marked as run-by-test have the documented effect on a running
// pod. Running them needs root.
//
// A fenced block of docs/operations.md, docs/reference.md or docs/dataplane.md takes part by its
// info string:
//
//	sh run-by-test          a script that must end with status 0
//	sh run-by-test=stream   lines, each of which continues until Ctrl-C
//	sh run-by-test=fails    lines, each of which must fail
//	text log-of-lb          lines that the log of lb must then hold; … matches any text
//	sh needs=cluster        commands that no test runs, and their requirement; in every document
package docs
