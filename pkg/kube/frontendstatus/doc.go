// Package frontendstatus follows the status of the frontend in the same pod.
package frontendstatus
