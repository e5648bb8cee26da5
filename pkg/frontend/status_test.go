package frontend

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bird"
)

// Some versions of BIRD keep the last error of a session while the next session is up.
func TestStatusForgetsErrorsOfEarlierSessions(t *testing.T) {
	const lastError = "Received: Administrative shutdown"
	for name, tt := range map[string]struct {
		alive, up         bool
		state, wantsError string
	}{
		"up":                   {true, true, "Established", ""},
		"down":                 {true, false, "Active (" + lastError + ")", lastError},
		"BIRD does not answer": {false, true, "unknown, BIRD does not answer", lastError},
	} {
		t.Run(name, func(t *testing.T) {
			state := "Active"
			if tt.up {
				state = "Established"
			}
			o, _ := testObserver()
			p := &process{observer: o}
			var s frontendv1.Status
			b := bird.State{Alive: tt.alive, Gateways: []bird.GatewayState{{
				Name: "gateway-a4", Up: tt.up, State: state, LastError: lastError,
			}}}
			p.birdStatus(&s, b, time.Now())
			m := p.birdMetrics(b)
			if up := tt.alive && tt.up; s.GetGateways()[0].GetUp() != up || m.Gateways[0].Up != up || m.Up != tt.alive {
				t.Errorf("up in status %t, metrics %+v", s.GetGateways()[0].GetUp(), m)
			}
			if g := s.GetGateways()[0]; g.GetState() != tt.state || g.GetLastError() != tt.wantsError {
				t.Errorf("state %q, last error %q, want %q, %q", g.GetState(), g.GetLastError(), tt.state,
					tt.wantsError)
			}
		})
	}
}

func TestStatusOfSpeakerWithoutPassword(t *testing.T) {
	for password, want := range map[string]string{"": "FRR 8.4.4 without a password", "secret": "FRR 8.4.4"} {
		o, _ := testObserver()
		p := &process{observer: o}
		p.External = &ExternalSpeaker{Session: announce.Options{Password: password}}
		var s frontendv1.Status
		p.birdStatus(&s, bird.State{Version: "FRR 8.4.4"}, time.Now())
		if got := s.GetBird().GetVersion(); got != want {
			t.Errorf("version %q, want %q", got, want)
		}
	}
}
