package bird

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
)

// DefaultImportLimit is the maximum number of routes that BIRD accepts from a gateway.
const DefaultImportLimit = 1000

// Bounds of the time between route requests to a gateway beyond its limit. The gateway sends all
// routes each time.
const minReload, maxReload = 30 * time.Second, 10 * time.Minute

// imports maps protocols to their reached import limits. After reaching the limit BIRD 2 ignores
// every new route, even a default route, until the gateway's routes are requested again. BIRD 3
// accepts new routes below the limit, but not the routes that it ignored before.
type imports map[string]*importLimit

// importLimit is the state of a reached limit.
type importLimit struct {
	hit      time.Time // last poll at which BIRD ignored routes
	reloaded time.Time // time of the last route request
	delay    backoff.Backoff
	reload   time.Time // time of the next route request
}

// blocked reports whether BIRD ignores routes of a protocol. BIRD 3 shows the limit as hit until
// the session restarts.
func (protocol Protocol) blocked(version string) bool {
	return slices.ContainsFunc(protocol.Channels[:], func(channel Channel) bool {
		return channel.LimitHit && (version < "3" || channel.Imported >= channel.ImportLimit)
	})
}

// observe returns the protocols whose routes must be requested again: with back-off while BIRD
// ignores routes, and once more afterwards.
func (m imports) observe(now time.Time, protocols map[string]Protocol, version string) (reload []string) {
	for name, protocol := range protocols {
		l, known := m[name]
		switch {
		case strings.HasPrefix(name, gatewayPrefix) && protocol.blocked(version):
			if !known {
				l = &importLimit{delay: backoff.Backoff{Min: minReload, Max: maxReload}}
				l.reload = now.Add(l.delay.Next())
				m[name] = l
			}
			if l.hit = now; now.Before(l.reload) {
				continue
			}
			l.reloaded, l.reload = now, now.Add(l.delay.Next())
			reload = append(reload, name)
		case known && now.Sub(l.hit) >= minReload:
			if l.reloaded.Before(l.hit) {
				reload = append(reload, name)
			}
			delete(m, name)
		}
	}
	maps.DeleteFunc(m, func(name string, _ *importLimit) bool { _, ok := protocols[name]; return !ok })
	return reload
}

// describe adds the state of the limits to the gateways.
func (m imports) describe(gateways []GatewayState) {
	for i := range gateways {
		if gateway := &gateways[i]; m[gatewayPrefix+gateway.Name] != nil {
			gateway.ImportsBlocked = true
			gateway.Warning = fmt.Sprintf("import limit reached with %d routes, further ones are ignored; "+
				"correct the routes that it sends, or raise --import-limit", gateway.Imported)
		}
	}
}

// watchImports requests the routes again that BIRD ignored.
func (supervisor *Supervisor) watchImports(ctx context.Context, now time.Time, protocols map[string]Protocol,
	version string,
) {
	reload := "reload in"
	if version >= "3" {
		reload = "reload filters in"
	}
	for _, protocol := range supervisor.imports.observe(now, protocols, version) {
		_, err := supervisor.command(ctx, reload+` "`+protocol+`"`)
		supervisor.options.Log.Info("requested the gateway's routes again after its import limit",
			"protocol", protocol, "error", err)
	}
}
