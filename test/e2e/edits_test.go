package e2e

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// editVIPs are the VIPs of the edits, served by a single pod: each withdrawal loses connections.
var editVIPs = []string{"20.0.0.1/32", "20.0.0.2/32", "2000::1/128"}

// editedStream is a stream of an edit. targets lists "NAME=NUMBER", where the number selects the
// addresses.
type editedStream struct {
	name    string
	vips    []string
	targets []string
}

// editedTrench returns a trench file with these streams, without those that have no VIP.
func editedTrench(streams []editedStream) string {
	text := dataPlaneTrench()
	text = strings.Replace(text, `20.0.0.1/32, "2000::1/128"`, quoted(editVIPs), 1)
	text = text[:strings.Index(text, "streams:")] + "streams:\n"
	for _, stream := range streams {
		if len(stream.vips) == 0 {
			continue
		}
		text += fmt.Sprintf("  - name: %s\n    vips: [%s]\n    check: {tcp: {port: %d}, %s}\n", stream.name,
			quoted(stream.vips), lab.HealthPort, lab.CheckTimers)
		text += "    drainTime: 2m\n    targets:\n"
		for _, target := range stream.targets {
			name, a := targetOf(target)
			text += fmt.Sprintf("      - {name: %s, ips: [%s, \"%s\"]}\n", name, a[0], a[1])
		}
	}
	return text
}

// targetOf returns the name and the addresses of "NAME=NUMBER".
func targetOf(text string) (name string, addresses []netip.Addr) {
	name, digits, _ := strings.Cut(text, "=")
	number, err := strconv.Atoi(digits)
	if err != nil {
		panic(err)
	}
	return name, lab.TargetAddrs(number)
}

// quoted returns a YAML list of strings.
func quoted(list []string) string { return `"` + strings.Join(list, `", "`) + `"` }

// edit is a change of the trench file.
type edit struct {
	name    string
	streams []editedStream
	starts  int // the number of a target that becomes healthy only after the edit; 0 for none
}

// editFixture is a pod under load whose trench file is edited.
type editFixture struct {
	*dataPlaneFixture
	load *load.Generator
}

func newEditFixture(t *testing.T, streams ...editedStream) *editFixture {
	t.Helper()
	if lack := lab.MissingForTopology(); lack != "" {
		lab.Skip(t, lack)
	}
	var vips []netip.Addr
	for _, v := range editVIPs {
		vips = append(vips, netip.MustParsePrefix(v).Addr())
	}
	f := &editFixture{dataPlaneFixture: newDataPlaneFixtureWith(t, lab.TopologyConfig{Pods: 1, Targets: 6, VIPs: vips})}
	f.must(f.WriteTrench(editedTrench(streams)))
	f.start()
	var err error
	f.load, err = f.Load(f.ctx, 60, 12, load.Config{Redial: true})
	f.must(err)
	t.Cleanup(func() { f.load.Stop(t.Context()) })
	return f
}

// settle waits until every flow is open and the phase has answers of every VIP.
func (f *editFixture) settle() {
	f.t.Helper()
	f.must(f.load.WaitFlows(f.ctx))
	_, err := f.load.Wait(f.ctx, func(r load.Result) error {
		if r.Answered < 20 {
			return fmt.Errorf("%d requests answered", r.Answered)
		}
		return nil
	})
	f.must(err)
}

// apply writes an edit and waits until the kernel has it: each VIP leads to its stream, and the
// chains of the targets have their names and addresses.
func (f *editFixture) apply(change edit) {
	f.t.Helper()
	f.must(f.WriteTrench(editedTrench(change.streams)))
	err := lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		installed, err := f.pod.Namespace().Run(f.ctx, "nft", "-s", "list", "table", "inet", "vipgate-lb")
		for _, stream := range change.streams {
			for _, v := range stream.vips {
				element := regexp.QuoteMeta(netip.MustParsePrefix(v).Addr().String() + " : goto stream/" + stream.name)
				if err == nil && !regexp.MustCompile(element+`[ ,]`).MatchString(installed) {
					err = fmt.Errorf("no element %s in\n%s", element, installed)
				}
			}
			for _, target := range stream.targets {
				name, a := targetOf(target)
				comment := fmt.Sprintf("%q", stream.name+"/"+name+" "+a[0].String()+" "+a[1].String())
				if err == nil && len(stream.vips) > 0 && !strings.Contains(installed, comment) {
					err = fmt.Errorf("no chain with the comment %s in\n%s", comment, installed)
				}
			}
		}
		return err
	})
	if err != nil {
		f.t.Fatalf("%s: %v", change.name, err)
	}
}

// delay writes an edit while a target fails its checks, and lets it pass once lb shows that the
// VIPs stay with their old stream.
func (f *editFixture) delay(change edit) {
	f.t.Helper()
	target := f.Targets[change.starts-1]
	f.must(target.Unhealthy())
	f.must(f.WriteTrench(editedTrench(change.streams)))
	f.waitOutput("until its new stream is ready; stream "+change.streams[0].name+": 0 of", "status")
	f.settle()
	f.must(target.Start())
}

// edits applies edits under load. None may lose a request, or break a flow: flows of targets that
// leave the stream of their VIP drain for longer than the test lasts.
func (f *editFixture) edits(changes ...edit) {
	f.t.Helper()
	for _, change := range changes {
		f.settle()
		if change.starts > 0 {
			f.delay(change)
		}
		f.apply(change)
		f.settle()
		result, err := f.load.Take(f.ctx)
		f.must(err)
		f.t.Logf("%s: %d requests, %d flows to %v, longest gap %v", change.name, result.Sent, len(result.Flows),
			result.Targets(), result.LongestGap())
		if err := result.Lost(); err != nil {
			f.t.Errorf("%s: %v", change.name, err)
		}
	}
}

// The streams of the edits: pairs of targets with different addresses.
var (
	firstPair  = []string{"a=1", "b=2"}
	secondPair = []string{"c=3", "d=4"}
)

func TestStreamRenameLosesNothing(t *testing.T) {
	t.Parallel()
	stream := func(name string, targets ...string) []editedStream {
		return []editedStream{{name, editVIPs, targets}}
	}
	f := newEditFixture(t, stream("web", firstPair...)...)
	f.edits(
		edit{name: "rename to a later name", streams: stream("www", firstPair...)},
		edit{name: "rename to an earlier name", streams: stream("app", firstPair...)},
		edit{name: "rename with other target names", streams: stream("bpp", "x=1", "y=2")},
		edit{name: "rename, and a target more", streams: stream("cpp", "x=1", "y=2", "z=3")},
	)
}

func TestVIPMoveLosesNothing(t *testing.T) {
	t.Parallel()
	streams := func(first, second []string) []editedStream {
		return []editedStream{{"web", first, firstPair}, {"api", second, firstPair}}
	}
	f := newEditFixture(t, streams(editVIPs, nil)...)
	f.edits(
		edit{name: "first VIP of IPv4", streams: streams(editVIPs[1:], editVIPs[:1])},
		edit{name: "second VIP of IPv4", streams: streams(editVIPs[2:], editVIPs[:2])},
		edit{name: "first VIP of IPv6", streams: streams(nil, editVIPs)},
		edit{name: "all back", streams: streams(editVIPs, nil)},
		edit{name: "to a stream of new targets", streams: []editedStream{
			{"new", editVIPs, secondPair},
		}},
		edit{name: "to a stream of a new and an old target", streams: []editedStream{
			{"mixed", editVIPs, []string{"a=1", "d=4"}},
		}},
		edit{name: "to a stream that is not ready yet", starts: 5, streams: []editedStream{
			{"late", editVIPs, []string{"e=5"}},
		}},
	)
}

func TestAddressSwapLosesNothing(t *testing.T) {
	t.Parallel()
	streams := func(first, second []string) []editedStream {
		return []editedStream{{"web", editVIPs[:1], first}, {"api", editVIPs[1:], second}}
	}
	f := newEditFixture(t, streams(firstPair, secondPair)...)
	f.edits(
		edit{name: "within a stream", streams: streams([]string{"a=2", "b=1"}, secondPair)},
		edit{name: "between streams", streams: streams([]string{"a=3", "b=1"}, []string{"c=2", "d=4"})},
		edit{name: "one target each", streams: streams([]string{"a=3"}, []string{"c=2"})},
		edit{name: "between streams of one target each", streams: streams([]string{"a=2"}, []string{"c=3"})},
		edit{name: "another address", streams: streams([]string{"a=5"}, []string{"c=6"})},
		edit{name: "another name", streams: streams([]string{"x=5"}, []string{"y=6"})},
	)
}

// A burst of edits counts as no flap: damping would withdraw VIPs whose targets are healthy.
func TestEditStormLosesNothing(t *testing.T) {
	t.Parallel()
	streams := func(web, api string, first, second int, targets ...string) []editedStream {
		return []editedStream{{web, editVIPs[:first], targets[:2]}, {api, editVIPs[second:], targets[2:]}}
	}
	all := slices.Concat(firstPair, secondPair)
	swapped, back := []string{"a=2", "b=1", "c=3", "d=4"}, all
	f := newEditFixture(t, streams("web", "api", 1, 1, all...)...)
	f.edits(
		edit{name: "rename 1", streams: streams("www", "api", 1, 1, all...)},
		edit{name: "move 1", streams: streams("www", "api", 2, 2, all...)},
		edit{name: "move 2", streams: streams("www", "api", 1, 1, all...)},
		edit{name: "swap 1", streams: streams("www", "api", 1, 1, swapped...)},
		edit{name: "rename 2", streams: streams("www", "app", 1, 1, swapped...)},
		edit{name: "move 3", streams: streams("www", "app", 2, 2, swapped...)},
		edit{name: "move 4", streams: streams("www", "app", 3, 3, swapped...)},
		edit{name: "rename 3", streams: streams("web", "app", 3, 3, swapped...)},
		edit{name: "swap 2", streams: streams("web", "app", 3, 3, back...)},
		edit{name: "move 5", streams: streams("web", "app", 0, 0, back...)},
		edit{name: "move 6", streams: streams("web", "app", 1, 1, back...)},
	)
}
