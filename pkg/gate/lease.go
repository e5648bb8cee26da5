package gate

import "time"

// lease is what is known of the freshness of a source that must renew itself.
type lease struct {
	// end is when the newest renewal runs out; zero before the first.
	end time.Time
	// extended is the end of the one extension that a late look grants.
	extended time.Time
}

// renew moves the end of the lease, and makes a later late look possible again.
func (l *lease) renew(end time.Time) {
	if end.Equal(l.end) {
		return
	}
	*l = lease{end: end}
}

// look tells whether the lease holds at now, or else whether it is being given
// the benefit of the doubt because the look came late.
func (l *lease) look(now time.Time) (holds, doubt bool) {
	switch {
	case l.end.IsZero():
		return false, false
	case now.Before(l.end):
		return true, false
	case l.extended.IsZero():
		// The first look after the end decides whether there is an extension,
		// so that a lease seen to end in time never revives by itself.
		l.extended = l.end
		if now.Sub(l.end) > lateAfter {
			l.extended = now.Add(lateAfter)
		}
	}
	return false, now.Before(l.extended)
}

// deadline is when look will answer differently; zero if never.
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
