// Package journal records the decisions of a program for operators: it logs the transitions of
// VIPs, keeps the newest events and serves them. A component that must not block passes its
// decisions through a [Queue].
package journal
