package gate

import "time"

// lease tracks the validity of data whose source must renew it.
type lease struct {
	// renewed is when the newest renewal expires without a stall; zero before the first.
	renewed time.Time
	// end is when the lease expires: later than renewed by the stalls of this process since then.
	end time.Time
	// extended is the end of the single extension after a late check.
	extended time.Time
	// expired is true from an expiry until the lease is found valid again: a renewal that is over when
	// it comes is no reason for an extension.
	expired bool
}

// renew moves the end of the lease and allows an extension again. A renewal that is older than a
// stall keeps the end that the stall has moved.
func (l *lease) renew(end time.Time) {
	switch {
	case end.Equal(l.renewed):
	case l.renewed.Before(l.end) && end.Before(l.end):
		l.renewed = end
	default:
		*l = lease{renewed: end, end: end, expired: l.expired || !l.extended.IsZero()}
	}
}

// stall moves the end of a lease that was not found expired by a stall of this process, up to limit:
// the stall may be older than the newest renewal.
func (lease *lease) stall(duration time.Duration, limit time.Time) {
	if !lease.end.IsZero() && lease.extended.IsZero() && lease.end.Before(limit) {
		lease.end = earlier(lease.end.Add(duration), limit)
	}
}

// check reports whether the lease is valid at now, or else extended because the check was late.
func (lease *lease) check(now time.Time) (holds, late bool) {
	switch {
	case lease.end.IsZero():
		return false, false
	case now.Before(lease.end):
		lease.expired = false
		return true, false
	case lease.extended.IsZero():
		// Only the first check after the end can extend the lease: a lease that was found expired in
		// time stays expired until it is renewed.
		lease.extended = lease.end
		if !lease.expired && now.Sub(lease.end) > lateAfter {
			lease.extended = now.Add(min(now.Sub(lease.end), maxExtension))
		}
	}
	return false, now.Before(lease.extended)
}

// deadline returns when the result of check changes; zero if never.
func (lease *lease) deadline(now time.Time) time.Time {
	switch {
	case lease.end.IsZero():
		return time.Time{}
	case now.Before(lease.end):
		return lease.end
	case now.Before(lease.extended):
		return lease.extended
	}
	return time.Time{}
}
