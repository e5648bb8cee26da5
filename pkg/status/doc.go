// Package status renders the status of the two programs as text.
//
// The functions are pure: they render messages and a time as text. Problems come first, even with
// ten thousand VIPs. Each reason has an explanation and the next check. Control characters are
// removed from the text of other components.
package status
