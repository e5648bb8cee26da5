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

// document is the trench file of an attractor. Each object is on a separate line, so that a
// problem can be mapped to its object.
type document struct {
	vips     []*nspv1.Vip
	gateways []*nspv1.Gateway
}

// Lines before the first VIP, and between the last VIP and the first gateway.
const (
	linesBefore  = 4
	linesBetween = 1
)

// write returns the document. Strings are always quoted, so that YAML does not read them as
// syntax.
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

// quote returns a quoted YAML scalar. The escapes of Go are valid in YAML.
func quote(s string) string { return strconv.QuoteToASCII(s) }

// gateway returns a gateway on one line. A field that is 0 is omitted, so that its default
// applies.
func (o *Options) gateway(g *nspv1.Gateway) string {
	address, _ := gatewayAddress(g) // checkGateway refused invalid addresses
	fields := []string{"name: " + quote(g.GetName()), "address: " + quote(address.String())}
	add := func(field string, n uint32, unit string) {
		if n != 0 {
			fields = append(fields, fmt.Sprintf("%s: %d%s", field, n, unit))
		}
	}
	if g.GetProtocol() != "" {
		fields = append(fields, "protocol: "+quote(g.GetProtocol()))
	}
	// Meridio's objects may have BGP defaults even if the protocol is static.
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

// place is the position of an object in the document.
type place struct {
	kind string
	i    int
}

func sortedPlaces(m map[place]Refusal) []place {
	return slices.SortedFunc(maps.Keys(m), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.i, b.i))
	})
}

// name returns the name of the object at a place, or "" if there is none.
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

// refusals returns the objects that have problems, each with all its problems. It omits problems
// that do not belong to an object.
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

// nameLines replaces line numbers by the names of the objects on these lines.
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
