// Package nsp is the client of Meridio's NSP, the service that holds the configuration of a trench.
//
// [Source] watches the attractor of a frontend, and publishes it in the model and by the rules of
// the trench file. A VIP or gateway that violates these rules is left out and reported by name; the
// rest of the list takes effect. A list that equals the one in force costs only a comparison. The
// last accepted list is stored in a file, in force after a start until the NSP sends one.
//
// [Registration] keeps the frontend registered at the NSP while it has external connectivity.
//
// Every call has a deadline or ends with a dead connection. Every failure is counted and retried
// with back-off. The stream is read without pause, because a stalled reader blocks the NSP for
// the whole trench. Source and Registration are independent, and no other task waits for them.
package nsp
