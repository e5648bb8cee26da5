package readiness

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// response is one message of a watch.
type response = readinessv1.WatchReadinessResponse

// The wire values of states and families.
var (
	wireStates = []readinessv1.VipState{
		vip.NotReady: readinessv1.VipState_VIP_STATE_NOT_READY,
		vip.Ready:    readinessv1.VipState_VIP_STATE_READY,
		vip.Draining: readinessv1.VipState_VIP_STATE_DRAINING,
	}
	wireFamilies = []readinessv1.IpFamily{
		vip.IPv4: readinessv1.IpFamily_IP_FAMILY_IPV4,
		vip.IPv6: readinessv1.IpFamily_IP_FAMILY_IPV6,
	}
)

// FamiliesProto returns the connectivity of address families as messages.
func FamiliesProto(up map[vip.Family]bool) (list []*readinessv1.FamilyConnectivity) {
	for _, f := range vip.Families {
		if u, configured := up[f]; configured {
			list = append(list, &readinessv1.FamilyConnectivity{Family: wireFamilies[f], Up: u})
		}
	}
	return list
}

// Proto returns the position as a message; nil for the zero Position.
func (p Position) Proto() *readinessv1.Position {
	if p == (Position{}) {
		return nil
	}
	return &readinessv1.Position{InstanceId: p.InstanceID, Revision: p.Revision}
}

// Proto returns the readiness as a message. The remaining drain time is relative to now.
func (r VIPReadiness) Proto(now time.Time) *readinessv1.VipReadiness {
	m := &readinessv1.VipReadiness{
		Vip: r.VIP.String(), State: wireStates[r.State], Reason: r.Reason, Detail: r.Detail,
		ReadyTargets: r.ReadyTargets, TotalTargets: r.TotalTargets,
	}
	if r.State == vip.Draining {
		m.DrainFor = drainFor(r.DrainEnd, now)
	}
	if !r.Since.IsZero() {
		m.Since = timestamppb.New(r.Since)
	}
	return m
}

// drainFor returns the remaining drain time, limited to the maximum that a receiver accepts.
func drainFor(end, now time.Time) *durationpb.Duration {
	return durationpb.New(min(max(0, end.Sub(now)), maxStaleGrace))
}

// durationFromProto decodes a duration and checks its bounds. An absent duration is zero.
func durationFromProto(m *durationpb.Duration, field string, least, most time.Duration) (time.Duration, error) {
	if m != nil {
		if err := m.CheckValid(); err != nil {
			return 0, fmt.Errorf("%s: %w", field, err)
		}
	}
	d := m.AsDuration()
	if d < least || d > most {
		return 0, fmt.Errorf("%s is %v, outside %v…%v", field, d, least, most)
	}
	return d, nil
}

// isClean reports whether s is printable ASCII that cleanDetail would not change, as most details
// are.
func isClean(s string) bool {
	if len(s) > MaxDetailBytes || strings.TrimSpace(s) != s {
		return false
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// cleanDetail returns s as one line of valid UTF-8 of at most MaxDetailBytes. Details contain
// errors of external systems and are written to logs, terminals and protobuf strings.
func cleanDetail(s string) string {
	if isClean(s) {
		return s
	}
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s[:min(len(s), MaxDetailBytes+utf8.UTFMax)])
	for len(s) > MaxDetailBytes {
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return strings.TrimSpace(s)
}
