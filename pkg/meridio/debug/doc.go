// Package debug writes the document of Meridio's `frontend --debug`.
package debug
