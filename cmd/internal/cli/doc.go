// Package cli contains the shared parts of the command lines: groups of flags, environment
// variables with aliases, exit statuses, and the clients of the admin socket and the health port.
package cli
