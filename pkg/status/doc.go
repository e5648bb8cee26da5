// Package status renders the status of the two programs for people.
//
// The functions are pure: messages and the time go in, text comes out. What
// needs a person comes first: counts, what does not serve, VIPs that are not
// advertised; so the first screen is worth reading with ten thousand VIPs, too.
// Text that came from elsewhere, such as the error of a check, is printed
// without control characters.
//
// Every reason is explained in words, with what to look at next. Talking to the
// admin socket, redrawing and exit statuses are left to the commands.
package status
