// Package frontendstatus follows the status of the frontend in the same pod, and calls it.
package frontendstatus
