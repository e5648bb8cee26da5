// Package targetset unites the targets that all sources offer.
//
// A source is the trench file ([TrenchFile]) or the registry (package registry). Each [Offer] has a
// [Lifecycle], and [SourceGonePolicy] decides what happens to the targets of a source that is gone.
// [Drains] are ordered by an operator and survive restarts.
//
// [Set] is pure: no clock, no goroutine, no I/O. Its cost follows the streams that changed, and an
// address belongs to one target of a stream. An offer that [AddressPolicy] or another offer
// excludes is reported as a problem and does not affect the remaining offers.
//
// [Index] lists the targets with their health, for status, metrics and watchers; its writer never
// waits for a reader.
//
// A new source is an [Origin] here, whatever produces its [Offers], and a line in pkg/lb/sources.go
// that passes them to [Set.Offer].
package targetset
