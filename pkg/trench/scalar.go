package trench

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/vip"
)

// scalar returns a scalar as it is written, whatever YAML takes it for: a name may be 123 or yes.
func (v value) scalar(remedy string) (string, bool) {
	switch {
	case v.node.Kind != yaml.ScalarNode:
		v.problem("is %s: %s", v.typeName(), remedy)
	case v.isNull(), v.node.Value == "":
		v.problem("is empty: %s", remedy)
	case v.node.Style&yaml.TaggedStyle != 0:
		v.problem("has the YAML tag %s: remove the tag", v.node.Tag)
	default:
		return v.node.Value, true
	}
	return "", false
}

// refuse reports a scalar that is not what the remedy says.
func (v value) refuse(remedy string) bool {
	v.problem("is %s: %s", quote(v.node.Value), remedy)
	return false
}

// text is a text that has a form.
type text struct {
	to *string
	is *form
}

// form is what a text looks like.
type form struct {
	pattern *regexp.Regexp
	remedy  string
	// check returns what is wrong with a text that matches the pattern, "" for nothing. It may be nil.
	check func(s string) string
}

func newForm(pattern, remedy string, check func(s string) string) *form {
	return &form{regexp.MustCompile(pattern), remedy, check}
}

func (t text) read(v value) bool {
	s, ok := v.scalar(t.is.remedy)
	if !ok {
		return false
	}
	if !t.is.pattern.MatchString(s) {
		return v.refuse(t.is.remedy)
	}
	if t.is.check != nil {
		v.report(t.is.check(s))
	}
	*t.to = s
	return true
}

const (
	portPattern = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
	// codePattern is a status that a final answer can have (RFC 9110 section 15), or a range.
	codePattern = `[2-5][0-9]{2}(-[2-5][0-9]{2})?`
	pathPattern = `^/[\s\S]*[^/.]`
	bodyRemedy  = "write a regular expression (RE2) of 1 to 1000 characters, or remove the field to take any body"
)

// The forms of texts. Gateway names become names of BIRD's protocols, and all names appear in
// metrics and logs. A host has 253 characters at most (RFC 1035 section 2.3.4).
var (
	nameForm     = newForm(`^[A-Za-z0-9_.-]{1,60}$`, "write 1 to 60 characters out of A-Z a-z 0-9 _ . -", nil)
	protocolForm = newForm(`^bgp$`, "write bgp, the only protocol so far", nil)
	passwordForm = newForm(pathPattern,
		"write the absolute path of the file with the password, or remove the field for no password", nil)
	authorityForm = newForm(pathPattern,
		"write the absolute path of the PEM file with the authorities, or remove the field for the system's", nil)
	requestForm = newForm(`^/[!-"$-~]{0,999}$`, "write a path such as /healthz or /healthz?full=1, "+
		"in at most 1000 characters of ASCII, others and spaces as %20", checkRequest)
	hostForm = newForm(`^([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f.]{0,99}:[0-9A-Fa-f:.]{0,99}\])(:`+portPattern+`)?$`,
		"write a name or address such as example.org, 10.0.0.1:8080 or [fd00::1]:8080, in ASCII", nil)
	serverForm = newForm(`^[A-Za-z0-9_.:-]{1,253}$`,
		"write the name or address that the certificate has, such as example.org, in ASCII", nil)
	serviceForm = newForm(`^[!-~]{1,200}$`, "write the name of a service in 1 to 200 characters of ASCII "+
		"without a space, or remove the field for the whole server", nil)
	bodyForm   = newForm(`^[\s\S]{1,1000}$`, bodyRemedy, checkBody)
	statusForm = newForm(`^`+codePattern+`(,`+codePattern+`){0,19}$`,
		`write numbers and ranges between 200 and 599, such as "200-399,404", at most 20`, checkStatus)
	familiesForm = newForm(`^(ipv4|ipv6|both)$`, "write ipv4, ipv6 or both", nil)
)

func checkRequest(s string) string {
	if _, err := url.ParseRequestURI(s); err != nil {
		return fmt.Sprintf("is %s, in which a %% is not followed by two hexadecimal digits: "+
			"write %%25 for a percent sign", quote(s))
	}
	return ""
}

// checkBody refuses what is no regular expression. It is kept as text: checks are comparable.
func checkBody(s string) string {
	_, err := regexp.Compile(s)
	if what := (*syntax.Error)(nil); errors.As(err, &what) {
		return fmt.Sprintf("is %s, no regular expression (RE2): %s at %s: "+
			"change it, or write \\Q before text that is meant literally", quote(s), what.Code, quote(what.Expr))
	}
	return ""
}

func checkStatus(s string) string {
	for part := range strings.SplitSeq(s, ",") {
		if lo, hi, isRange := strings.Cut(part, "-"); isRange && lo > hi {
			return fmt.Sprintf("has the range %s, whose end lies before its begin: write %s-%s", part, hi, lo)
		}
	}
	return ""
}

// number is a decimal number between lo and hi.
type number struct {
	lo, hi  uint32
	initial uint32 // 0 for none
	set     func(n uint32)
}

func numberOf[T uint8 | uint16 | uint32 | int](to *T, lo, hi uint32) number {
	return number{lo, hi, uint32(*to), func(n uint32) { *to = T(n) }}
}

func port(to *uint16) number { return numberOf(to, 1, math.MaxUint16) }
func asn(to *uint32) number  { return numberOf(to, 1, math.MaxUint32-1) }

func (n number) read(v value) bool {
	remedy := fmt.Sprintf("write a whole number between %d and %d", n.lo, n.hi)
	s, ok := v.scalar(remedy)
	if !ok {
		return false
	}
	x, err := strconv.ParseUint(s, 10, 32)
	if err != nil || x < uint64(n.lo) || x > uint64(n.hi) || s[0] == '0' {
		return v.refuse(remedy)
	}
	n.set(uint32(x))
	return true
}

// checkASN returns why a number cannot be a gateway's AS, or "".
func checkASN(n uint32) string {
	switch n {
	case 0:
		return "is 0, which is reserved (RFC 7607): write the AS number of that side"
	case 23456:
		return "is 23456, which stands for 4-octet AS numbers (RFC 6793): write the AS number itself"
	case 65535, math.MaxUint32:
		return fmt.Sprintf("is %d, which is reserved (RFC 7300): write the AS number of that side", n)
	case LoopbackASN:
		return fmt.Sprintf("is %d, which vipgate itself uses on the loopback session: "+
			"choose another private AS number", n)
	}
	return ""
}

// boolean is true or false, in quotes or not.
type boolean struct{ to *bool }

func (b boolean) read(v value) bool {
	const remedy = "write true or false"
	s, ok := v.scalar(remedy)
	if ok && s != "true" && s != "false" {
		return v.refuse(remedy)
	}
	*b.to = s == "true"
	return ok
}

// duration is a duration such as 500ms between lo and hi. Where below names another field, that
// one's value is the upper bound in the schema.
type duration struct {
	to     *time.Duration
	lo, hi time.Duration
	below  string
}

func (d duration) read(v value) bool {
	remedy := fmt.Sprintf("write a duration with its unit between %s and %s", inUnits(d.lo), inUnits(d.hi))
	s, ok := v.scalar(remedy)
	if !ok {
		return false
	}
	x, err := time.ParseDuration(s)
	if err != nil {
		if f, errNumber := strconv.ParseFloat(s, 64); errNumber == nil && f > 0 && f < math.MaxInt32 {
			v.problem("is %s, which has no unit: write %ss or %sms", quote(s), s, s)
			return false
		}
	}
	// Go takes 0 without a unit, and a 0s that has a sign.
	if err != nil || x < d.lo || x > d.hi || s[0] == '-' || strings.TrimLeft(s, "+0") == "" {
		return v.refuse(remedy)
	}
	*d.to = x
	return true
}

// inUnits writes a duration in its largest unit that makes it a whole number.
func inUnits(d time.Duration) string {
	switch {
	case d == 0:
		return "0s"
	case d%time.Hour == 0:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d%time.Minute == 0:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d%time.Second == 0:
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return d.String()
}

// checkHoldTime returns why BGP cannot have the hold time, or "".
func checkHoldTime(d time.Duration) string {
	if d < MinHoldTime || d > MaxHoldTime || d%time.Second != 0 {
		return fmt.Sprintf("is %s: BGP wants whole seconds between %s and %s (RFC 4271)",
			d, inUnits(MinHoldTime), inUnits(MaxHoldTime))
	}
	return ""
}

// prefix is a VIP.
type prefix struct{ to *vip.VIP }

func newPrefix(to *vip.VIP) prefix { return prefix{to} }

func (p prefix) read(v value) bool {
	s, ok := v.scalar("write a VIP such as 20.0.0.1/32 or 2000::1/128")
	if !ok {
		return false
	}
	x, err := vip.Parse(s)
	if err != nil {
		v.problem("%v", err)
		return false
	}
	*p.to = x
	return true
}

// address is an address that a host can have.
type address struct{ to *netip.Addr }

func newAddress(to *netip.Addr) address { return address{to} }

func (a address) read(v value) bool {
	s, ok := v.scalar("write an IP address such as 172.16.1.1")
	if !ok {
		return false
	}
	x, err := netip.ParseAddr(s)
	if err != nil {
		if p, errPrefix := netip.ParsePrefix(s); errPrefix == nil {
			v.problem("is %s, which has a prefix length: write %s", quote(s), p.Addr())
		} else {
			v.problem("is %s, not an IP address: write one such as 172.16.1.1", quote(s))
		}
		return false
	}
	if x.Zone() != "" { // which can be any text
		v.problem("is %s, which has a zone: write an address that needs none", quote(s))
		return false
	}
	if what, remedy := vip.NotHost(x); what != "" {
		v.problem("is %s, %s: %s", x, what, remedy)
		return false
	}
	*a.to = x
	return true
}
