// Package nsptest serves nsp.v1 as the NSP of Meridio 1.2.8 does: an attractor's list is
// repeated on each event, a first registration is DISABLED, entries expire, and a watcher that
// does not read delays all other watchers. It can be slow, hang, be absent and restart at its
// address.
package nsptest
