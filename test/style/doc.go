// Package style checks the wording of comments, strings, documents and test names, the length of
// lines, and that lb and frontend do not depend on Kubernetes. testdata/words.txt lists the
// words that are not used, testdata/allowance.txt the findings that remain in each directory.
package style
