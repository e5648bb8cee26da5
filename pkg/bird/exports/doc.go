// Package exports reads the routes that BIRD exports to gateways, with their attributes.
package exports
