// Package nsp is the client of Meridio's NSP, the service that holds the configuration of a trench.
//
// [Source] follows the attractor of a frontend and publishes it as the same model as the trench
// file, by the rules of the trench file. A VIP or gateway that these rules refuse is left out
// alone, and reported by name. A list that equals the one in force costs a comparison. The last
// accepted list is kept in a file, and is in force after a start until the NSP sends one.
//
// [Registration] keeps the frontend registered at the NSP while it has external connectivity.
//
// Every call has a deadline or is ended by a dead connection, every failure is counted and retried
// with back-off, and the stream is always read: a reader that stalls blocks the NSP for the whole
// trench. Neither waits for the other, and nothing else waits for them.
package nsp
