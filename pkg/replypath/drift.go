package replypath

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// readRuleset reads the nftables tables. The fingerprint changes with everything in them but
// counters and peers.
func (k *kernel) readRuleset() (fingerprint string, netdev *objects, err error) {
	for _, f := range tableFamilies {
		o, err := listTable(k.nft, f)
		if err != nil {
			return "", nil, err
		}
		fingerprint += o.fingerprint.String()
		if f == unix.NFPROTO_NETDEV {
			netdev = o
		}
	}
	k.dropped = netdev.dropped
	return fingerprint, netdev, nil
}

// ruleset brings the nftables tables to their desired content, and reads it back. With restore
// false it changes no more than the live peers. It returns what was missing, "" for nothing.
func (k *kernel) ruleset(d desired, restore bool) (missing string, err error) {
	fingerprint, netdev, err := k.readRuleset()
	if err != nil {
		return "", err
	}
	switch {
	case k.written == "":
		missing = "nftables tables"
	case fingerprint != k.written:
		missing = difference(k.written, fingerprint)
	case k.device != d.device:
		missing = "chains of " + k.o.Interface
	case !slices.Equal(k.pool, d.pool):
		missing = "pool"
	case slices.Equal(k.live, d.live):
		return "", nil
	}
	t := d.write(netdev)
	if missing == "" {
		t = d.writeLive()
	} else if !restore {
		return missing, nil
	}
	for range writeAttempts {
		before, err := k.nft.Generation()
		if err != nil {
			return missing, err
		}
		k.written = ""
		if err := t.commit(k.nft); err != nil {
			return missing, err
		}
		if fingerprint, netdev, err = k.readRuleset(); err != nil {
			return missing, err
		}
		after, err := k.nft.Generation()
		if err != nil {
			return missing, err
		}
		if after == before+1 {
			k.written, k.pool, k.device, k.live = fingerprint, d.pool, d.device, d.live
			return missing, nil
		}
		// Another process changed the ruleset meanwhile: what was read may not be what was written.
		t = d.write(netdev)
	}
	return missing, fmt.Errorf("the ruleset changed %d times meanwhile", writeAttempts)
}

// writeAttempts bounds how often the tables are written since another process changed the ruleset.
const writeAttempts = 5

// difference names the first object by which two fingerprints differ.
func difference(was, is string) string {
	for _, other := range []string{is, was} {
		lines := map[string]bool{}
		for line := range strings.Lines(other) {
			lines[line] = true
		}
		family := ""
		for line := range strings.Lines(was) {
			words := strings.Fields(line)
			if len(words) == 1 {
				family = words[0]
			} else if !lines[line] {
				return objectName(family, words)
			}
		}
		was = is
	}
	return "nftables objects"
}

// objectName names the object of a line of a fingerprint, which is an element of a set if it has no
// kind.
func objectName(family string, words []string) string {
	name := "nftables " + family + " " + words[0]
	if words[0] == "chain" || words[0] == "rule" || words[0] == "set" {
		name += " " + words[1]
	}
	return name
}
