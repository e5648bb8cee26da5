package main

import (
	"context"
	"net/netip"
	"slices"
	"time"
)

// budget is the limit of both numbers of every VIP, and of the pods that withdraw one.
type budget struct {
	Name  string        `json:"name"`
	Limit time.Duration `json:"limit"`
	Pods  int           `json:"pods"`
}

var (
	unplanned = budget{"unplanned", time.Second, pods}
	planned   = budget{"planned", 0, pods}
	wrong     = budget{"wrong edit", 0, 1}
)

// scenario is one incident.
type scenario struct {
	ID     string `json:"incident"`
	Title  string `json:"title"`
	Link   string `json:"link"`
	Cause  string `json:"cause"` // as injected
	Budget budget `json:"budget"`
	Note   string `json:"note,omitempty"` // a restriction of the replay

	dns      bool                // the checks are DNS queries, also those of the reference
	unserved map[netip.Addr]bool // VIPs whose targets no longer serve

	before       []string // replacements in the trench file before the start, as pairs
	lb, frontend []string // further flags
	// inject causes the incident in vipgate, and returns once it is over.
	inject func(context.Context, *fixture) error
	// reference causes it in the common pattern; nil if that has no counterpart.
	reference func(context.Context, *fixture) error
}

// scenarios returns all incidents in the order of their numbers.
func scenarios() []scenario {
	return []scenario{
		{
			ID: "I1", Title: "Meta 2021", Link: "https://engineering.fb.com/2021/10/05/networking-traffic/outage-details",
			Cause: "all targets fail their checks and serve", Budget: unplanned,
			Note: "`lastResort: depreferred`", inject: unhealthy, reference: unhealthy,
			before: []string{"drainTime: 1s\n", "drainTime: 1s\n    lastResort: depreferred\n"},
		},
		{
			ID: "I2", Title: "GCE 2016", Link: "https://status.cloud.google.com/incident/compute/16007",
			Cause: "one of four VIPs left in the file", Budget: wrong,
			inject: emptyList, reference: scripted(func(s *script) { s.listed = vips[:1] }),
		},
		{
			ID: "I3", Title: "Cloudflare 2022", Link: "https://thecount.com/2022/06/21/cloudflare-outage-tuesday",
			Cause: "an edit replaces one of four VIPs, as `validate --diff` shows", Budget: wrong,
			inject: replaceVIP, reference: scripted(func(s *script) { s.listed = slices.Concat(vips[:2], vips[3:]) }),
		},
		{
			ID: "I4", Title: "Cloudflare 2025",
			Link:  "https://thousandeyes.com/blog/cloudflare-outage-analysis-july-14-2025",
			Cause: "all gateways replaced by an offline one", Budget: wrong,
			inject: moveOffline, reference: scripted(func(s *script) { s.neighbors = [][]netip.Addr{offline} }),
		},
		{
			ID: "I5", Title: "Cloudflare 2026", Link: "https://codeblack.cc/2026/02",
			Cause: "all streams deleted", Budget: wrong,
			inject: deleteStreams, reference: scripted(func(s *script) { s.listed = nil }),
		},
		{
			ID: "I6", Title: "Google 2019", Link: "https://status.cloud.google.com/incident/cloud-networking/19009",
			Cause: "every `lb` dead for 8 s", Budget: unplanned,
			Note: "`--on-lb-loss=keep --stale-grace=1m`",
			lb:   []string{"--stale-grace=1m"}, frontend: []string{"--on-lb-loss=keep"},
			inject: stopControl, reference: stopControl,
		},
		{
			ID: "I7", Title: "AWS 2025", Link: "https://aws.amazon.com/message/101925",
			Cause: "wire of a starting pod alternates for 8 s", Budget: unplanned,
			inject: startFlapping, reference: startFlapping,
		},
		{
			ID: "I8", Title: "Datadog 2023",
			Link:  "https://datadoghq.com/blog/engineering/2023-03-08-deep-dive-into-platform-level-impact",
			Cause: "policy rules of both pods deleted", Budget: unplanned,
			inject: shell(flushRules, ":"), reference: shell(flushRoutes, ":"),
		},
		{
			ID: "I9", Title: "Heroku 2025", Link: "https://heroku.com/blog/summary-of-june-10-outage",
			Cause: "routes of pods and rules of targets flushed", Budget: unplanned,
			inject: shell(flushRoutes, flushRules), reference: shell(flushRoutes, flushRules),
		},
		{
			ID: "I10", Title: "Reddit 2023", Link: "https://redditwatch.org/outages/reddit-pi-day-outage-2023",
			Cause: "all target lists empty", Budget: wrong,
			Note: "no API server", inject: emptySelectors,
			reference: scripted(func(s *script) { s.targets = nil }),
		},
		{
			ID: "I11", Title: "K-root", Link: "https://go.mail-archive.com/dns-wg@ripe.net/msg00401.html",
			Cause: "`lb` starts 4 s after its `frontend`", Budget: unplanned, dns: true,
			inject: startLate, reference: startLate,
		},
		{
			ID: "I12", Title: "RIPE NCC 2024", Link: "https://mailman.ripe.net/archives/list/dns-wg@ripe.net/2024/4",
			Cause: "BIRD of a pod configured by another process", Budget: unplanned, dns: true,
			inject: replaceBIRD,
		},
		{
			ID: "I13", Title: "Cloudflare 2023",
			Link:  "https://blog.cloudflare.com/1-1-1-1-lookup-failures-on-october-4th-2023",
			Cause: "all targets of two VIPs answer with errors", Budget: unplanned, dns: true,
			unserved: map[netip.Addr]bool{vips[0]: true, vips[1]: true},
			inject:   failAnswers, reference: failAnswers,
		},
		{
			ID: "I14", Title: "Rogers, Optus", Link: "https://kentik.com/blog/digging-into-the-optus-outage",
			Cause: "gateways send 20 000 routes", Budget: unplanned,
			Note: "reference: limit of 1000", frontend: []string{"--import-routes=all"},
			inject: flood, reference: flood,
		},
		{
			ID: "I15", Title: "MetalLB #1944", Link: "https://github.com/metallb/metallb/issues/1944",
			Cause: "hold time of all gateways edited", Budget: planned,
			inject: edit("holdTime: 3s", "holdTime: 4s"), reference: scripted(func(s *script) { s.hold++ }),
		},
		{
			ID: "I16", Title: "MetalLB #2470", Link: "https://github.com/metallb/metallb/pull/2715",
			Cause: "file rewritten unchanged, as at a cordon", Budget: planned,
			Note:   "no API server",
			inject: edit("trench: trench-a\n", "# cordoned\ntrench: trench-a\n"),
		},
		{
			ID: "I17", Title: "fediverse 2023", Link: "https://wiki.fediverse.foundation",
			Cause: "file frozen, then a target ends", Budget: unplanned,
			Note: "no API server", inject: abortTarget, reference: abortTarget,
		},
		{
			ID: "I18", Title: "MetalLB #777", Link: "https://github.com/metallb/metallb/issues/777",
			Cause: "gateway replaced, packets of old sessions dropped", Budget: unplanned,
			inject: failOver, reference: failOver,
		},
		{
			ID: "I19", Title: "Fastly 2021", Link: "https://fastly.com/blog/summary-of-june-8-outage",
			Cause: "every `lb` crashes twice after an edit", Budget: unplanned,
			inject: crashAfterEdit,
		},
	}
}
