package kube

import (
	"os"
	"slices"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

// ordered is the line of the trench file by which frontends rely on the Lease of turns.
const ordered = "onePodAtATime: true\n"

// write writes the result. While a change of gateways waits for the turn of this pod, it writes the
// rest of the result with the gateways in force.
func (a *agent) write(result translation.Result) (wrote bool, err error) {
	if a.turns == nil || result.Config == nil {
		return a.files.write(result)
	}
	if a.gateways == nil {
		a.gateways = a.files.gateways()
	}
	next := result.Config.Attractor.Gateways
	waiting := lastSessions(a.gateways, next)
	granted, changed := a.turns.Ask(waiting)
	if len(waiting) > 0 && !granted {
		a.turn, next = changed, withhold(a.gateways, next, waiting)
		var valid bool
		if result, valid = a.files.with(result, next); !valid {
			return false, nil // the gateways in force do not fit the rest: all of it waits
		}
	}
	// The frontend of this pod needs no other order of the pods.
	result.File = append(slices.Clip(result.File), ordered...)
	if wrote, err = a.files.write(result); err != nil {
		return wrote, err
	}
	a.gateways = slices.Concat([]trench.Gateway{}, next) // not nil
	if granted {
		a.turns.Ask(nil) // the change is on disk
	}
	return wrote, nil
}

// lastSessions returns the gateways of old, the only ones of their family, whose session restarts.
func lastSessions(old, next []trench.Gateway) (gateways []trench.Gateway) {
	names := change.RestartsLast(old, next)
	for _, gateway := range old {
		if slices.Contains(names, gateway.Name) {
			gateways = append(gateways, gateway)
		}
	}
	return gateways
}

// withhold returns next with the gateways that wait as they are in old.
func withhold(old, next, waiting []trench.Gateway) []trench.Gateway {
	mixed := slices.Clone(next)
	for _, gateway := range waiting {
		successor, _ := change.Successor(gateway, old, next) // exists, or the session would not restart
		nth := slices.IndexFunc(next, func(other trench.Gateway) bool { return other.Name == successor.Name })
		mixed[nth] = gateway
	}
	return mixed
}

// gateways returns the gateways of the trench file on disk, empty without a valid file.
func (f *files) gateways() []trench.Gateway {
	data, err := os.ReadFile(f.trench)
	if err == nil {
		config, err := trenchfile.ParseExplicit(f.trench, data, trench.DefaultDefaults())
		if err == nil && config.Attractor.Gateways != nil {
			return config.Attractor.Gateways
		}
	}
	return []trench.Gateway{}
}

// with returns the result with other gateways, and reports whether the trench file is valid.
func (f *files) with(result translation.Result, gateways []trench.Gateway) (translation.Result, bool) {
	config := *result.Config
	config.Attractor.Gateways = gateways
	if len(trench.Validate(config.Complete(trench.DefaultDefaults()))) > 0 {
		return result, false
	}
	result.Config, result.File = &config, translation.File(result.Trench.Object.Namespace, &config)
	return result, true
}
