// Package dashboard serves a page that shows the pods of a trench live in a browser.
//
// It is read-only, and nothing is shown as good unless its program confirmed it within the last
// seconds: the last state of a program that does not answer stays visible as old. A program that
// hangs delays only its own state. Pods are asked while a page is open.
//
// Names and errors are untrusted. The page inserts them as text, and its content security policy
// permits only its own script. Only requests that name the loopback address and the random path get
// an answer, so that neither other users of the machine nor other web sites can read it.
package dashboard
