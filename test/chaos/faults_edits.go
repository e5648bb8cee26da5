package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// edit is a change of the trench file.
type edit struct {
	name   string
	change func(text string) string
}

// renames move no traffic: targets, their addresses and the VIPs stay.
var renames = []edit{
	{"streams renamed", replace("- name: stream-", "- name: renamed-")},
	{"targets renamed", replace("{name: target-", "{name: renamed-")},
	{"streams and targets renamed", replace("- name: stream-", "- name: renamed-", "{name: target-", "{name: renamed-")},
}

// moves exchange the VIPs of two streams whose targets are ready.
var moves = []edit{
	{"VIPs of stream-a and stream-d exchanged", exchangeVIPs(0, 3)},
	{"VIPs of stream-a and stream-c exchanged", exchangeVIPs(0, 2)},
}

// sessionEdits restart every session, one gateway after another.
var sessionEdits = []edit{
	{"another hold time", replace(fmt.Sprintf("holdTime: %s", holdTime), fmt.Sprintf("holdTime: %s", 2*holdTime))},
	{"other names of the gateways", replace("{name: gateway-", "{name: peer-")},
}

// tenantEdits are what a tenant may add for a VIP of its own, at the limits of what lb and frontend
// accept. Nothing answers its checks.
var tenantEdits = []edit{
	{"200 large expressions", tenant(200, 1, `http: {port: 5000, body: "(?:ab?){0,450}"}`)},
	{"1000 streams", tenant(1000, 1, "tcp: {port: 1}")},
	{"1000 targets", tenant(1, 1000, "udp: {port: 1, send: x}")},
}

// tenant returns an edit that adds a VIP with streams, and a policy as large as one can be.
func tenant(streams, targets int, check string) func(string) string {
	const served = `"203.0.113.9/32"`
	var b strings.Builder
	for s := range streams {
		fmt.Fprintf(&b, "  - name: tenant-%d\n    vips: [%s]\n    check: {%s, interval: 100ms, timeout: 100ms}\n"+
			"    targets:\n", s, served, check)
		for t := range targets {
			fmt.Fprintf(&b, "      - {name: tenant-%d, ips: [172.16.%d.%d]}\n", t, 200+t/250, 1+t%250)
		}
	}
	policy := "  policies:\n    - {vips: [" + served + `], ready: {prepend: 10, communities: ["64512:0"`
	for n := range 19 {
		policy += fmt.Sprintf(`, "64512:%d"`, n+1)
	}
	policy += "]}}\n"
	return func(text string) string {
		text = strings.Replace(text, "  vips:\n", "  vips:\n    - "+served+"\n", 1)
		return strings.Replace(text, "streams:\n", policy+"streams:\n", 1) + b.String()
	}
}

func replace(oldNew ...string) func(string) string { return strings.NewReplacer(oldNew...).Replace }

// exchangeVIPs returns an edit that gives each of two streams the VIPs that only the other one has.
func exchangeVIPs(a, b int) func(string) string {
	var pairs []string
	for family := range families {
		first, second := ownVIP(a, family), ownVIP(b, family)
		pairs = append(pairs, first, second, second, first)
	}
	return func(text string) string {
		attractor, streams, _ := strings.Cut(text, "\nstreams:\n")
		return attractor + "\nstreams:\n" + strings.NewReplacer(pairs...).Replace(streams)
	}
}

// ownVIP returns the VIP that only one stream has, as the trench file has it.
func ownVIP(stream, family int) string {
	return fmt.Sprintf("- %q\n", vips[stream*families+family].prefix)
}

// editKinds returns edits of the trench file. The heal of each is the file from before it.
func editKinds() []*kind {
	of := func(all []edit) func(*kind) *kind {
		return func(k *kind) *kind {
			k = k.variants(len(all), func(arg int) string { return all[arg].name })
			return k.by(func(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
				return fx.write(all[f.Arg].change(trenchText()))
			})
		}
	}
	// While VIPs are exchanged, the targets of another stream decide on them.
	targets := []string{resTrench}
	for t := range touchable {
		targets = append(targets, resTarget(t))
	}
	removed := simple("VIPs removed", 4, ms(0, 2500), ofEdits, nothing, resTrench).by(removeVIPs).variants(
		untouchedStream, func(arg int) string { return "of " + streams[arg].name },
	)
	removed.touches = ofStream
	sessions := of(sessionEdits)(simple("gateways edited", 5, ms(0, 4000), ofEdits, everything, resTrench))
	sessions.TakesTurns, sessions.inject = true, turns(sessions.inject)
	var touched []int // so many that their removal waits for a confirmation
	for v := range vips {
		if vips[v].streams[0] != untouchedStream {
			touched = append(touched, v)
		}
	}
	return []*kind{
		of(renames)(simple("trench file edited", 6, ms(0, 3000), quiet, nothing, resTrench)),
		of(moves)(simple("VIPs moved", 5, ms(0, 3000), quiet, nothing, targets...)),
		simple("most VIPs removed", 4, ms(0, 3000), quiet, nothing, resTrench).by(
			func(_ context.Context, fx *fixture, _ fault) (func(context.Context) error, error) {
				return fx.write(trenchWithout(touched...))
			}),
		removed,
		sessions,
		of(tenantEdits)(simple("hostile tenant", 4, ms(0, 3000), quiet, nothing, resTrench)),
	}
}

// sessionsSubject is disturbed while sessions restart in turns.
const sessionsSubject = "sessions"

// turns returns a function that injects an edit of gateways. Its heal waits until the sessions have
// taken their turns.
func turns(inject func(context.Context, *fixture, fault) (func(context.Context) error, error)) func(context.Context,
	*fixture, fault) (func(context.Context) error, error) {
	return func(ctx context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
		fx.timeline.set(sessionsSubject, disturbed)
		restore, err := inject(ctx, fx, f)
		return func(ctx context.Context) error {
			err := restore(ctx)
			bound, cancel := context.WithTimeout(ctx, recoveryBound)
			defer cancel()
			quiet := 0 // the frontend reads the file soon after the write
			// With an error, the frontend does not run: the calm point waits for it.
			_ = lab.Eventually(bound, 100*time.Millisecond, func() error {
				if quiet++; len(fx.changing(bound)) > 0 {
					quiet = 0
				}
				if quiet < 5 {
					return errors.New("sessions take turns")
				}
				return nil
			})
			fx.timeline.set(sessionsSubject, healthy)
			return err
		}, err
	}
}

// changing returns the change of gateways that the frontend has not finished. Until then a gateway
// that holds every VIP may lose them again.
func (fx *fixture) changing(ctx context.Context) []string {
	conn, err := grpc.NewClient("unix:"+fx.pod.FrontendAdmin(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return []string{fmt.Sprintf("the frontend's status: %v", err)}
	}
	defer conn.Close()
	status, err := frontendv1.NewFrontendServiceClient(conn).GetStatus(ctx, &adminv1.GetStatusRequest{})
	if err != nil {
		return []string{fmt.Sprintf("the frontend's status: %v", err)}
	}
	var names []string
	for _, gateway := range status.GetGateways() {
		if change := gateway.GetChange(); change != "" {
			names = append(names, fmt.Sprintf("the end of a change of %s: %s", gateway.GetName(), change))
		}
	}
	return names
}

// write replaces the trench file, and the heal restores it.
func (fx *fixture) write(text string) (func(context.Context) error, error) {
	heal := func(context.Context) error { return fx.pod.WriteTrench(trenchText()) }
	return heal, fx.pod.WriteTrench(text)
}

// removeVIPs removes the VIPs of a stream, so few that it needs no confirmation.
func removeVIPs(_ context.Context, fx *fixture, f fault) (func(context.Context) error, error) {
	own := []int{f.Arg * families, f.Arg*families + 1}
	subjects := []string{vipSubject(own[ipv4]), vipSubject(own[ipv6])}
	restore, err := fx.write(trenchWithout(own...))
	fx.timeline.set2(down, subjects...)
	return func(ctx context.Context) error {
		fx.timeline.set2(healthy, subjects...)
		return restore(ctx)
	}, err
}
