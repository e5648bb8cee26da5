package replypath

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// readRuleset reads the nftables tables. The fingerprint covers their content except counters and
// peers.
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

// ruleset writes the desired content of the nftables tables and reads it back. With restore false
// it writes at most the live peers. It returns the first missing object, or "".
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
		// If the commit or the read fails, the next call rewrites the tables.
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
		// The ruleset generation shows a foreign transaction between write and dump, so the dump may
		// contain another process's changes.
		t = d.write(netdev)
	}
	return missing, fmt.Errorf("the ruleset changed %d times meanwhile", writeAttempts)
}

// writeAttempts limits the writes of the tables while another process changes the ruleset.
const writeAttempts = 5

// difference returns the name of the first object that differs between two fingerprints.
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

// objectName returns the name of the object in a fingerprint line. A line without an object kind
// is a set element.
func objectName(family string, words []string) string {
	name := "nftables " + family + " " + words[0]
	if words[0] == "chain" || words[0] == "rule" || words[0] == "set" {
		name += " " + words[1]
	}
	return name
}
