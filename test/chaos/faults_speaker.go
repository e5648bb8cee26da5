package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// externalCatalog returns the faults with an FRR as the speaker. The frontend then neither routes
// nor owns the namespace.
func externalCatalog() []*kind {
	all := slices.DeleteFunc(catalog(), func(k *kind) bool {
		return strings.HasPrefix(k.Name, "bird ") || k.Name == "routes of gateways flushed" || k.Name == "second instance"
	})
	// Other fields of gateways than the address belong to the speaker.
	i := slices.IndexFunc(all, func(k *kind) bool { return k.Name == "gateways edited" })
	all[i].Breadth, all[i].touches = quiet, constant(nothing)
	return append(all, speakerKinds()...)
}

// speakerKinds returns the faults of an FRR in the pod, and of the announcer's link.
func speakerKinds() []*kind {
	kill := func(name string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
		return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return fx.speaker.killDaemon(name)
		}
	}
	stop := func(name string) func(context.Context, *fixture, fault) (func(context.Context) error, error) {
		return func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
			return stopProcess(running(fx.speaker.process(name)))
		}
	}
	all, atB := everything, atGateway(gatewayB, bothFamilies...)
	return []*kind{
		simple("speaker kill -9", 5, ms(0, 4000), wide, all, resSpeaker).by(killSpeaker),
		simple("speaker restart", 4, ms(0, 2000), wide, all, resSpeaker).by(restartSpeaker),
		simple("speaker bgpd kill -9", 6, ms(0, 4000), wide, all, resSpeaker).by(kill("bgpd")),
		simple("speaker bgpd SIGSTOP", 5, ms(700, 5500), wide, all, resSpeaker).by(stop("bgpd")),
		simple("speaker bgpd pause", 3, ms(50, 700), quiet, nothing, resSpeaker).by(stop("bgpd")),
		simple("speaker zebra kill -9", 3, ms(0, 2000), wide, all, resSpeaker).by(kill("zebra")),
		simple("speaker zebra SIGSTOP", 2, ms(500, 5000), wide, all, resSpeaker).by(stop("zebra")),
		// Gateway B has BFD with the speaker.
		simple("speaker bfdd kill -9", 2, ms(0, 2000), ofGateway, atB, resSpeaker).by(kill("bfdd")),
		simple("speaker bfdd SIGSTOP", 2, ms(500, 5000), ofGateway, atB, resSpeaker).by(stop("bfdd")),
		simple("announcer's packets dropped", 4, ms(500, 5500), wide, all, resFamily(ipv4), resFamily(ipv6)).by(
			dropAnnouncer),
	}
}

// killSpeaker kills every daemon of the pod's FRR.
func killSpeaker(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	return func(context.Context) error { return fx.speaker.start() }, fx.speaker.kill()
}

// restartSpeaker ends the pod's FRR as an init system does, and starts it again.
func restartSpeaker(ctx context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	bound, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	return func(context.Context) error { return fx.speaker.start() }, fx.speaker.stop(bound)
}

// dropAnnouncer drops every packet from the frontend to the speaker.
func dropAnnouncer(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
	rule := fmt.Sprintf("ip saddr %s ip daddr %s drop", announcer, speakerAddr.Addr())
	return fx.drop(fx.Pod, "announcer", "input", []string{rule}, stopped, "announcer")
}
