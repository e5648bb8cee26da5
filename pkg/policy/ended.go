package policy

import (
	"maps"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Ended finds the VIPs whose last stream left the configuration. They keep their policy, which may
// have left with the stream, because they are still announced while the load balancer drains them.
type Ended struct {
	VIPs   vip.Set
	served vip.Set // by the streams of the configuration
}

// Configure takes the next configuration.
func (ended *Ended) Configure(config *trench.Config) {
	configured, served := vip.NewSet(config.Attractor.VIPs...), vip.Set{}
	for _, stream := range config.Streams {
		maps.Copy(served, vip.NewSet(stream.VIPs...))
	}
	before := maps.Clone(ended.served)
	if before == nil {
		before = vip.Set{}
	}
	maps.Copy(before, ended.VIPs)
	maps.DeleteFunc(before, func(v vip.VIP, _ struct{}) bool { return served.Has(v) || !configured.Has(v) })
	ended.VIPs, ended.served = before, served
}
