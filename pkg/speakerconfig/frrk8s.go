package speakerconfig

import (
	"errors"
	"fmt"
)

// frrK8s is the kind of a FRRConfiguration. Its API allows a neighbor the prefixes of `network`
// statements only, which FRR advertises without an announcer. Hence its raw configuration adds an
// entry to the route map of each gateway: the AS path begins with the frontend's AS number, and FRR
// accepts no other prefixes from there than the VIPs.
const frrK8s = "frr-k8s"

// maxFRRK8sPort is the highest port of a neighbor in its API.
const maxFRRK8sPort = 16384

// checkFRRK8s refuses a session that frr-k8s cannot have.
func (speaker Speaker) checkFRRK8s() error {
	switch {
	case speaker.Listens == 0 || speaker.Listens > maxFRRK8sPort:
		return fmt.Errorf("--speaker-listen=%d: frr-k8s does not listen, and calls a port from 1 to %d, such as 10179",
			speaker.Listens, maxFRRK8sPort)
	case speaker.AS == speaker.FrontendAS:
		return errors.New("--speaker-local-as is required: it marks the VIPs, and is another AS number than the speaker's, " +
			"such as 4200000000")
	}
	return nil
}
