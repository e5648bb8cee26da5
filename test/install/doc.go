// Package install runs the commands of docs/install.md on a Debian machine of its own: an empty root
// with systemd as PID 1, and the package of vipgate.
package install
