// Package language checks the wording of comments, strings, documents and test
// names. testdata/words.txt lists the words that are not used.
package language
