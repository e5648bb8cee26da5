// Package status renders the status of the two programs as text.
//
// The functions are pure: messages and the time in, text out. Problems come first: counts, failed
// conditions, VIPs that are not advertised; the first screen shows them with ten thousand VIPs,
// too. Text from other components, such as the error of a check, is printed without control
// characters.
//
// Every reason is explained, with what to check next. The commands call the admin socket, redraw
// and set exit statuses.
package status
