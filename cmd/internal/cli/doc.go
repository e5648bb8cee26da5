// Package cli holds what the command lines of lb and frontend share: groups of
// flags, environment variables with Meridio's names as aliases, exit statuses,
// and the clients of the admin socket and the health port.
package cli
