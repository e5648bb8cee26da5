package nsp

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	nspv1 "github.com/vipgate/vipgate/pkg/api/nsp/v1"
	"github.com/vipgate/vipgate/pkg/trench"
)

// document is the trench file that says the same as an attractor. Each object has a line of its
// own, so that a problem leads back to it.
type document struct {
	vips     []*nspv1.Vip
	gateways []*nspv1.Gateway
}

// Lines before the first VIP, and between the last VIP and the first gateway.
const (
	linesBefore  = 4
	linesBetween = 1
)

// write returns the document. Text is always quoted: what YAML takes for syntax stays text.
func (d *document) write(o *Options) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "trench: %s\nattractor:\n  name: %s\n", quote(o.Trench), quote(o.Attractor))
	list := func(name string, n int, item func(i int) string) {
		if n == 0 {
			fmt.Fprintf(&b, "  %s: []\n", name)
			return
		}
		fmt.Fprintf(&b, "  %s:\n", name)
		for i := range n {
			fmt.Fprintf(&b, "  - %s\n", item(i))
		}
	}
	list("vips", len(d.vips), func(i int) string { return quote(d.vips[i].GetAddress()) })
	list("gateways", len(d.gateways), func(i int) string { return o.gateway(d.gateways[i]) })
	return b.Bytes()
}

// quote writes text as a YAML scalar: its escapes have those of Go.
func quote(s string) string { return strconv.QuoteToASCII(s) }

// gateway returns a gateway on one line. 0 leaves a field to the defaults.
func (o *Options) gateway(g *nspv1.Gateway) string {
	address, _ := gatewayAddress(g) // checkGateway refused others
	fields := []string{"name: " + quote(g.GetName()), "address: " + quote(address.String())}
	add := func(field string, n uint32, unit string) {
		if n != 0 {
			fields = append(fields, fmt.Sprintf("%s: %d%s", field, n, unit))
		}
	}
	if g.GetProtocol() != "" {
		fields = append(fields, "protocol: "+quote(g.GetProtocol()))
	}
	// Meridio's objects may have the defaults of BGP also where the protocol is static.
	if g.GetProtocol() != static {
		add("localASN", g.GetLocalAsn(), "")
		add("remoteASN", g.GetRemoteAsn(), "")
		add("localPort", g.GetLocalPort(), "")
		add("remotePort", g.GetRemotePort(), "")
		add("holdTime", g.GetHoldTime(), "s")
		if auth := bgpAuth(g); auth != nil {
			fields = append(fields, "passwordFile: "+quote(o.Keys.File(auth.GetKeySource(), auth.GetKeyName())))
		}
	}
	if g.GetBfd() {
		outer := fields
		fields = nil
		add("minTx", g.GetBfdSpec().GetMinTx(), "ms")
		add("minRx", g.GetBfdSpec().GetMinRx(), "ms")
		add("multiplier", g.GetBfdSpec().GetMultiplier(), "")
		fields = append(outer, "bfd: {"+strings.Join(fields, ", ")+"}")
	}
	return "{" + strings.Join(fields, ", ") + "}"
}

// static is the protocol of a gateway without BGP.
const static = "static"

// place is where an object is in the document.
type place struct {
	kind string
	i    int
}

func sortedPlaces(m map[place]Refusal) []place {
	return slices.SortedFunc(maps.Keys(m), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.i, b.i))
	})
}

// name returns the name of the object at a place, "" where there is none.
func (d *document) name(at place) string {
	switch {
	case at.kind == KindVIP && at.i < len(d.vips):
		return d.vips[at.i].GetName()
	case at.kind == KindGateway && at.i < len(d.gateways):
		return d.gateways[at.i].GetName()
	}
	return ""
}

var (
	objectField = regexp.MustCompile(`^attractor\.(vips|gateways)\[(\d+)\]\.?(.*)$`)
	lineNumber  = regexp.MustCompile(`line (\d+)`)
)

// refusals returns the objects that have a problem, each with all its problems. A problem of
// something else is not among them.
func (d *document) refusals(problems []trench.Problem) map[place]Refusal {
	found := map[place]Refusal{}
	for _, p := range problems {
		m := objectField.FindStringSubmatch(p.Field)
		if m == nil {
			continue
		}
		at := place{kind: KindVIP}
		if m[1] == "gateways" {
			at.kind = KindGateway
		}
		at.i, _ = strconv.Atoi(m[2]) // digits
		message := d.nameLines(p.Message)
		if m[3] != "" {
			message = m[3] + " " + message
		}
		r, more := found[at]
		if more {
			message = r.Problem + "; " + message
		}
		found[at] = Refusal{at.kind, d.name(at), message}
	}
	return found
}

// nameLines replaces numbers of lines by the objects on them.
func (d *document) nameLines(message string) string {
	return lineNumber.ReplaceAllStringFunc(message, func(s string) string {
		n, _ := strconv.Atoi(strings.TrimPrefix(s, "line "))
		at := place{KindVIP, n - linesBefore - 1}
		if at.i >= len(d.vips) {
			at = place{KindGateway, at.i - len(d.vips) - linesBetween}
		}
		if at.i < 0 || d.name(at) == "" {
			return s
		}
		return at.kind + " " + quoteName(d.name(at))
	})
}
