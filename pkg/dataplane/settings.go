package dataplane

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// settingsInterval is the time between two checks of the kernel parameters: the kernel
// reports changes of forwarding and rp_filter, of others none.
const settingsInterval = time.Second

// settingProblem is a kernel parameter that has a wrong value.
type settingProblem struct {
	Problem
	family vip.Family
	// drops: packets of VIPs are lost, not only spread unevenly over gateways.
	drops bool
}

// checkSettings reads the kernel parameters again when it is time, or when the kernel
// reported a change.
func (o *overseer) checkSettings(now time.Time) {
	if o.settings == nil || now.Sub(o.set) < settingsInterval {
		return
	}
	o.set = now
	o.wrong = o.settings()
}

// withheld says by family why no packet of a VIP gets through, with the command that
// corrects it.
func withheld(wrong []settingProblem) (why [len(vip.Families)]string) {
	for _, p := range wrong {
		if p.drops && why[p.family] == "" {
			why[p.family] = fmt.Sprintf("%s: %s; run %s", p.Object, p.Detail, p.Remedy)
		}
	}
	return why
}

// links lists the network interfaces.
func (f *fabric) links() ([]link, error) {
	var links []link
	err := f.look(unix.RTM_GETLINK, unix.AF_UNSPEC, ifinfomsgLength, func() { links = nil }, func(b []byte) {
		if l, ok := parseLink(b); ok {
			links = append(links, l)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	return links, nil
}
