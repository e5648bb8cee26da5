// Package change compares the configuration in force with the next one, to show or to limit the
// effect of an edit before the edit happens, and keeps the VIPs in force. It is pure.
package change
