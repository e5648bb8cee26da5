package gate

import "time"

// lease tracks the validity of data whose source must renew it.
type lease struct {
	// end is when the newest renewal expires; zero before the first.
	end time.Time
	// extended is the end of the single extension after a late check.
	extended time.Time
}

// renew moves the end of the lease and allows an extension again.
func (l *lease) renew(end time.Time) {
	if end.Equal(l.end) {
		return
	}
	*l = lease{end: end}
}

// check reports whether the lease is valid at now, and otherwise whether it is extended because
// the check was late.
func (l *lease) check(now time.Time) (holds, late bool) {
	switch {
	case l.end.IsZero():
		return false, false
	case now.Before(l.end):
		return true, false
	case l.extended.IsZero():
		// Only the first check after the end can extend the lease: a lease that was found expired in
		// time stays expired until it is renewed.
		l.extended = l.end
		if now.Sub(l.end) > lateAfter {
			l.extended = now.Add(lateAfter)
		}
	}
	return false, now.Before(l.extended)
}

// deadline returns when the result of check changes; zero if never.
func (l *lease) deadline(now time.Time) time.Time {
	switch {
	case l.end.IsZero():
		return time.Time{}
	case now.Before(l.end):
		return l.end
	case now.Before(l.extended):
		return l.extended
	}
	return time.Time{}
}
