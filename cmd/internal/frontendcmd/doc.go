// Package frontendcmd contains the flags and commands that cmd/frontend and cmd/meridio-frontend
// share: everything except the source of the configuration.
package frontendcmd
