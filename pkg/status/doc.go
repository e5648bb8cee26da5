// Package status renders the status of the two programs as text.
//
// The functions are pure: messages and the time in, text out. Problems come first, also with ten
// thousand VIPs, and each reason is explained, with what to check next. Text from other components
// is printed without control characters.
package status
