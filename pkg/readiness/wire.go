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
		Vip:          r.VIP.String(),
		Reason:       r.Reason,
		Detail:       r.Detail,
		ReadyTargets: r.ReadyTargets,
		TotalTargets: r.TotalTargets,
	}
	switch r.State {
	case Ready:
		m.State = readinessv1.VipState_VIP_STATE_READY
	case Draining:
		m.State = readinessv1.VipState_VIP_STATE_DRAINING
		// The receiver rejects a message with a longer drain time.
		m.DrainFor = durationpb.New(min(max(0, r.DrainEnd.Sub(now)), maxStaleGrace))
	default:
		m.State = readinessv1.VipState_VIP_STATE_NOT_READY
	}
	if !r.Since.IsZero() {
		m.Since = timestamppb.New(r.Since)
	}
	return m
}

// FamilyProto returns the wire value of an address family.
func FamilyProto(f vip.Family) readinessv1.IpFamily {
	if f == vip.IPv6 {
		return readinessv1.IpFamily_IP_FAMILY_IPV6
	}
	return readinessv1.IpFamily_IP_FAMILY_IPV4
}

// readinessFromProto decodes the readiness of a VIP. The drain time counts from at, the receipt.
func readinessFromProto(m *readinessv1.VipReadiness, at time.Time) (VIPReadiness, error) {
	v, err := vip.Parse(m.GetVip())
	if err != nil {
		return VIPReadiness{}, err
	}
	r := VIPReadiness{
		VIP:          v,
		Reason:       m.GetReason(),
		Detail:       cleanDetail(m.GetDetail()),
		ReadyTargets: m.GetReadyTargets(),
		TotalTargets: m.GetTotalTargets(),
	}
	switch m.GetState() {
	case readinessv1.VipState_VIP_STATE_READY:
		r.State = Ready
	case readinessv1.VipState_VIP_STATE_NOT_READY:
		r.State = NotReady
	case readinessv1.VipState_VIP_STATE_DRAINING:
		left, err := durationFromProto(m.GetDrainFor(), "drain_for", 0, maxStaleGrace)
		if err != nil {
			return VIPReadiness{}, fmt.Errorf("VIP %s: %w", v, err)
		}
		r.State, r.DrainEnd = Draining, at.Add(left)
	default:
		return VIPReadiness{}, fmt.Errorf("VIP %s has the unknown state %d", v, m.GetState())
	}
	// A reason added by a newer version does not invalidate the state.
	if _, known := readinessv1.VipReason_name[int32(r.Reason)]; !known {
		r.Reason = readinessv1.VipReason_VIP_REASON_UNSPECIFIED
	}
	if s := m.GetSince(); s != nil && s.IsValid() {
		r.Since = s.AsTime()
	}
	return r, nil
}

// durationFromProto decodes a duration within bounds; an absent one is zero.
func durationFromProto(m *durationpb.Duration, field string, least, most time.Duration) (time.Duration, error) {
	var d time.Duration
	if m != nil {
		if err := m.CheckValid(); err != nil {
			return 0, fmt.Errorf("%s: %w", field, err)
		}
		d = m.AsDuration()
	}
	if d < least || d > most {
		return 0, fmt.Errorf("%s is %v, outside %v…%v", field, d, least, most)
	}
	return d, nil
}

// cleanDetail returns s as one line of valid UTF-8 of at most MaxDetailBytes: details contain
// errors of external systems and are written to logs, terminals and proto strings.
func cleanDetail(s string) string {
	if s == "" {
		return ""
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
