// Package durable writes files that survive a crash, and stores small JSON documents in them.
package durable
