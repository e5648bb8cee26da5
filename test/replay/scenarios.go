package main

import (
	"context"
	"fmt"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// budget is the limit of both numbers of every VIP.
type budget struct {
	Name  string        `json:"name"`
	Limit time.Duration `json:"limit"`
}

var (
	unplanned = budget{"unplanned", time.Second}
	planned   = budget{"planned", 0}
	wrong     = budget{"wrong edit", 0}
)

// scenario is one incident.
type scenario struct {
	id, title, link string
	cause           string // as injected
	budget          budget
	note            string // a restriction of the replay

	before       [][2]string // replacements in the trench file before the start
	lb, frontend []string    // further flags
	// inject causes the incident in vipgate, and returns once it is over.
	inject func(context.Context, *fixture) error
	// reference causes it in the common pattern; nil if that has no counterpart.
	reference func(context.Context, *fixture) error
}

// scenarios returns all incidents in the order of their numbers.
func scenarios() []scenario {
	return []scenario{
		{
			id: "I1", title: "Meta 2021-10-04", link: "engineering.fb.com/2021/10/05/networking-traffic/outage-details",
			cause: "all targets of all VIPs fail their checks in all pods, and serve", budget: unplanned,
			note: "with `lastResort: depreferred`", before: lastResort, inject: unhealthy, reference: unhealthy,
		},
		{
			id: "I2", title: "GCE 2016-04-11", link: "status.cloud.google.com/incident/compute/16007",
			cause: "one of four VIPs left in the file of all pods", budget: wrong,
			inject: emptyList, reference: list(vips[0]),
		},
		{
			id: "I3", title: "Cloudflare 2022-06-21", link: "thecount.com/2022/06/21/cloudflare-outage-tuesday",
			cause: "edit withdraws a VIP: `validate --diff` shows it, and it is not applied", budget: wrong,
			inject: showDiff,
		},
		{
			id: "I4", title: "Cloudflare 2025-07-14", link: "thousandeyes.com/blog/cloudflare-outage-analysis-july-14-2025",
			cause: "all gateways replaced by one that is offline, in all pods", budget: wrong,
			inject: moveOffline, reference: moveScriptsOffline,
		},
		{
			id: "I5", title: "Cloudflare 2026-02-20", link: "codeblack.cc/2026/02",
			cause: "all streams deleted in all pods", budget: wrong,
			inject: deleteStreams, reference: list(),
		},
		{
			id: "I6", title: "Google 2019-06-02", link: "status.cloud.google.com/incident/cloud-networking/19009",
			cause: "both `lb` killed, absent for 8 s", budget: unplanned,
			note: "with `--on-lb-loss=keep --stale-grace=1m`",
			lb:   []string{"--stale-grace=1m"}, frontend: []string{"--on-lb-loss=keep"},
			inject: killBalancers, reference: stopScripts,
		},
		{
			id: "I7", title: "AWS 2025-10-20", link: "aws.amazon.com/message/101925",
			cause: "pod 2 starts; its wire to the targets alternates every 0.5 s for 8 s", budget: unplanned,
			inject: startFlapping, reference: startFlapping,
		},
		{
			id: "I8", title: "Datadog 2023-03-08",
			link:  "datadoghq.com/blog/engineering/2023-03-08-deep-dive-into-platform-level-impact",
			cause: "all policy rules of both pods deleted", budget: unplanned,
			inject: flushPodRules, reference: flushPodRoutes,
		},
		{
			id: "I9", title: "Heroku 2025-06-10", link: "heroku.com/blog/summary-of-june-10-outage",
			cause: "all routes of both pods and rules of all targets flushed", budget: unplanned,
			inject: flushRoutes, reference: flushPodRoutes,
		},
		{
			id: "I10", title: "Reddit 2023-03-14", link: "redditwatch.org/outages/reddit-pi-day-outage-2023",
			cause: "target lists of all streams empty in all pods", budget: wrong,
			note: "without the API server", inject: emptySelectors,
			reference: func(_ context.Context, fx *fixture) error {
				return fx.eachScript(func(s *script) error { s.targets = nil; return nil })
			},
		},
		{
			id: "I11", title: "K-root Belgrade, Reykjavik", link: "go.mail-archive.com/dns-wg@ripe.net/msg00401.html",
			cause: "pod 2 replaced; its `lb` starts 4 s after its `frontend`", budget: unplanned,
			inject: startLate, reference: startLate,
		},
		{
			id: "I12", title: "RIPE NCC 2024-04", link: "mailman.ripe.net/archives/list/dns-wg@ripe.net/2024/4",
			cause: "BIRD of pod 2 gets a configuration with static VIPs and without routes to clients", budget: unplanned,
			note: "no probe from beyond the gateways yet", inject: replaceBIRD,
		},
		{
			id: "I13", title: "Cloudflare 2023-10-04", link: "blog.cloudflare.com/1-1-1-1-lookup-failures-on-october-4th-2023",
			cause: "all targets of two VIPs answer with errors", budget: unplanned, note: "HTTP in place of DNS",
			before: [][2]string{{healthCheck, fmt.Sprintf("http: {port: %d}", lab.RequestPort)}},
			inject: failAnswers, reference: failAnswers,
		},
		{
			id: "I14", title: "Rogers 2022-07, Optus 2023-11", link: "kentik.com/blog/digging-into-the-optus-outage",
			cause: "both gateways send 20 000 routes", budget: unplanned,
			note: "reference with `import limit 1000`", frontend: []string{"--import-routes=all"},
			inject: flood, reference: flood,
		},
		{
			id: "I15", title: "MetalLB #1944, #2049", link: "github.com/metallb/metallb/issues/1944",
			cause: "hold time of all gateways edited in all pods", budget: planned,
			inject: func(ctx context.Context, fx *fixture) error {
				return fx.edit("holdTime: 3s", "holdTime: 4s")
			},
			reference: func(ctx context.Context, fx *fixture) error { return fx.eachScript((*script).changeHoldTime) },
		},
		{
			id: "I16", title: "MetalLB #2470", link: "github.com/metallb/metallb/pull/2715",
			cause: "trench file written again without a change", budget: planned,
			note: "a cordon changes nothing in kube's file (test/kube-e2e)",
			inject: func(ctx context.Context, fx *fixture) error {
				return fx.edit("trench: trench-a\n", "# cordoned\ntrench: trench-a\n")
			},
		},
		{
			id: "I17", title: "fediverse.foundation 2023-04-06", link: "wiki.fediverse.foundation",
			cause: "file not updated any more; then a target resets connections", budget: unplanned,
			note: "without the API server", inject: abortTarget, reference: abortTarget,
		},
		{
			id: "I18", title: "metallb#777", link: "github.com/metallb/metallb/issues/777",
			cause: "gateway A replaced, packets of its old sessions dropped", budget: unplanned,
			inject: failOver, reference: failOver,
		},
		{
			id: "I19", title: "Fastly 2021-06-08", link: "fastly.com/blog/summary-of-june-8-outage",
			cause: "both `lb` crash after an edit, also after restarts", budget: unplanned,
			inject: crashAfterEdit,
		},
	}
}

// lastResort makes both streams keep their VIPs when all targets fail.
var lastResort = [][2]string{}
