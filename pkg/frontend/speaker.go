package frontend

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// bgpSpeaker exports the announcer's VIPs to the gateways: our BIRD ([bird.Supervisor]) or a speaker
// that another program runs ([speaker.Observer]). No method but Confirm and Run blocks.
type bgpSpeaker interface {
	task.Loop
	State() *latest.Value[bird.State]
	Configure(attractor trench.Attractor)
	ApplyNow()
	Export(exports map[string]bird.Export)
	Attract(now time.Time, families [len(vip.Families)]bool)
	ExportRoutes()
	Expect(announced4, announced6 int)
	Confirm(ctx context.Context) error
}

// ExternalSpeaker is a BGP speaker that another program runs and configures.
type ExternalSpeaker struct {
	// Session configures the announcer's session with the speaker, without Log and OnWritten.
	Session announce.Options
	// View reads the speaker's sessions with the gateways; nil: not observed.
	View speaker.View
}

// newSpeaker returns the speaker, and the options of the announcer's session with it.
func (p *process) newSpeaker(o Options) (bgpSpeaker, announce.Options) {
	if o.External != nil {
		return speaker.NewObserver(speaker.Options{View: o.External.View, Log: o.Log}), o.External.Session
	}
	// Both ends of the loopback session get the same key.
	o.BIRD.Password, o.BIRD.OnAnswer = loopbackPassword(o), p.metrics.ControlLatency
	o.BIRD.DrainTime, o.BIRD.SlotTime = o.Gate.DrainTime, slotTime
	o.BIRD.Ordered = func() bool { return p.Source.Value().Load().Config.OnePodAtATime }
	return bird.NewSupervisor(o.BIRD), announce.Options{
		Local: bird.LoopbackAnnouncer, Peer: netip.AddrPortFrom(bird.LoopbackBIRD, o.BIRD.LoopbackPort),
		PeerAS: bird.LoopbackPeerAS, Password: o.BIRD.Password, HoldTime: o.BIRD.LoopbackHoldTime,
	}
}

// speakerName names the speaker in messages.
func (o Options) speakerName() string {
	if o.External != nil {
		return "the speaker"
	}
	return "BIRD"
}

// encoding returns how policies reach the gateways.
func (p *process) encoding() policy.Encoding {
	if p.External == nil {
		return policy.Carried
	}
	return policy.Direct(p.External.Session.PeerAS, p.External.Session.LocalAS)
}

// externalProblem returns why an external speaker does not accept VIPs, with the remedy.
func (o Options) externalProblem(err error) string {
	session := o.External.Session
	switch {
	case err != nil:
		return fmt.Sprintf("%v; check the speaker's session with %s (docs/speakers.md)", err, session.Local)
	case session.Listen.IsValid():
		return fmt.Sprintf("%s has not connected to %s yet", session.Peer.Addr(), session.Listen)
	}
	return fmt.Sprintf("no session with the speaker at %s yet", session.Peer)
}
