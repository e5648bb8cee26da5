// Package cli contains what the command lines of lb and frontend share: groups of flags, environment
// variables with aliases, exit statuses, and the clients of the admin socket and the health port.
package cli
