package trench

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/pkg/vip"
)

// scalar returns the text of a scalar regardless of its YAML type: a name may be 123 or yes.
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

// form is the syntax of a text.
type form struct {
	pattern *regexp.Regexp
	remedy  string
	// check returns why a text that matches the pattern is invalid, or "" if it is valid. Optional.
	check func(s string) string
}

func newForm(pattern, remedy string, check func(s string) string) form {
	return form{regexp.MustCompile(pattern), remedy, check}
}

const (
	portPattern = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
	// codePattern matches a final status code (RFC 9110 section 15) or a range of them.
	codePattern = `[2-5][0-9]{2}(-[2-5][0-9]{2})?`
	pathPattern = `^/[\s\S]*[^/.]`
)

// forms maps names to forms. BIRD protocols are named after gateways; all names appear in metrics
// and logs. A host has at most 253 characters (RFC 1035 section 2.3.4).
var forms = map[string]form{
	"name": newForm(`^[A-Za-z0-9_.-]{1,60}$`, "write 1 to 60 characters out of A-Z a-z 0-9 _ . -", nil),
	// The interface names of the kernel (dev_valid_name) that BIRD can quote: BIRD 2.0.12 to 3.4.0
	// parses the interface of a next hop as a symbol.
	"interface": newForm(`^[A-Za-z0-9_.-]{1,15}$`, "write the name of an interface in 1 to 15 characters out of "+
		"A-Z a-z 0-9 _ . -; BIRD takes no others (ip link set NAME name OTHER)", checkInterface),
	"protocol": newForm(`^(bgp|static)$`, "write bgp or static", nil),
	"password file": newForm(pathPattern,
		"write the absolute path of the file with the password, or remove the field for no password", nil),
	"CA file": newForm(pathPattern,
		"write the absolute path of the PEM file with the authorities, or remove the field for the system's", nil),
	"request": newForm(`^/[!-"$-~]{0,999}$`, "write a path such as /healthz or /healthz?full=1, "+
		"in at most 1000 characters of ASCII, others and spaces as %20", checkRequest),
	"host": newForm(`^([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f.]{0,99}:[0-9A-Fa-f:.]{0,99}\])(:`+portPattern+`)?$`,
		"write a name or address such as example.org, 10.0.0.1:8080 or [fd00::1]:8080, in ASCII", nil),
	"server name": newForm(`^[A-Za-z0-9_.:-]{1,253}$`,
		"write the name or address that the certificate has, such as example.org, in ASCII", nil),
	"service": newForm(`^[!-~]{1,200}$`, "write the name of a service in 1 to 200 characters of ASCII "+
		"without a space, or remove the field for the whole server", nil),
	"body": newForm(`^[\s\S]{1,1000}$`, "write a regular expression (RE2) of 1 to 1000 characters, "+
		"or remove the field to take any body", checkBody),
	"status": newForm(`^`+codePattern+`(,`+codePattern+`){0,19}$`,
		`write numbers and ranges between 200 and 599, such as "200-399,404", at most 20`, checkStatus),
	"transport": newForm(`^(tcp|udp|sctp)$`, "write tcp, udp or sctp", nil),
	"families":  newForm(`^(ipv4|ipv6|both)$`, "write ipv4, ipv6 or both", nil),
	"via":       newForm(`^(vip|address)$`, "write vip or address", nil),
}

func checkInterface(s string) string {
	if s == "." || s == ".." {
		return fmt.Sprintf("is %s, which no interface can be called: write the name that ip link shows", quote(s))
	}
	return ""
}

func checkRequest(s string) string {
	if _, err := url.ParseRequestURI(s); err != nil {
		return fmt.Sprintf("is %s, in which a %% is not followed by two hexadecimal digits: "+
			"write %%25 for a percent sign", quote(s))
	}
	return ""
}

// checkBody rejects an invalid regular expression. The field remains a string to keep checks
// comparable.
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

// checkASN returns why n cannot be the AS number of a gateway, or "" if it is valid.
func checkASN(n uint32) string {
	switch n {
	case 0:
		return "is 0, which is reserved (RFC 7607): write the AS number of that side"
	case 23456:
		return "is 23456, which stands for 4-octet AS numbers (RFC 6793): write the AS number itself"
	case 65535, math.MaxUint32:
		return fmt.Sprintf("is %d, which is reserved (RFC 7300): write the AS number of that side", n)
	}
	return ""
}

// checkHoldTime returns why BGP does not allow the hold time, or "" if it is valid.
func checkHoldTime(d time.Duration) string {
	if d < minHoldTime || d > maxHoldTime || d%time.Second != 0 {
		return fmt.Sprintf("is %s: BGP wants whole seconds between 3s and 65535s (RFC 4271)", d)
	}
	return ""
}

// Types with a separate parser.
var (
	vipType     = reflect.TypeFor[vip.VIP]()
	addressType = reflect.TypeFor[netip.Addr]()
)

// read stores a value according to the type and tag of its field and reports whether it is valid.
// in is the object that contains the field.
func (p *parser) read(v value, to reflect.Value, tag reflect.StructTag, in any) bool {
	switch x := to.Addr().Interface().(type) {
	case **BFD:
		*x = &BFD{}
		return p.object(v, to.Elem(), tag, in)
	case *vip.VIP:
		return v.vip(x)
	case *netip.Addr:
		return v.address(x)
	case *time.Duration:
		return v.duration(x, tag)
	case *Protocol:
		s, ok := v.text(forms["protocol"])
		*x = Protocol(max(0, slices.Index(protocolNames, s)))
		return ok
	case *Via:
		s, ok := v.text(forms["via"])
		*x = Via(max(0, slices.Index(viaNames, s)))
		return ok
	case *Families:
		s, ok := v.text(forms["families"])
		*x = Families(max(0, slices.Index(familyNames, s)))
		return ok
	}
	switch to.Kind() {
	case reflect.Struct:
		return p.object(v, to, tag, in)
	case reflect.Slice:
		return p.list(v, to, tag, in)
	case reflect.Bool:
		s, ok := v.text(booleanForm)
		to.SetBool(s == "true")
		return ok
	case reflect.String:
		s, ok := v.text(forms[tag.Get("form")])
		to.SetString(s)
		return ok
	}
	n, ok := v.number(tag)
	if to.CanUint() {
		to.SetUint(n)
	} else {
		to.SetInt(int64(n))
	}
	return ok
}

// booleanForm also accepts quoted values.
var booleanForm = newForm(`^(true|false)$`, "write true or false", nil)

func (v value) text(f form) (string, bool) {
	s, ok := v.scalar(f.remedy)
	if !ok {
		return "", false
	}
	problem := ""
	if !f.pattern.MatchString(s) {
		problem = fmt.Sprintf("is %s: %s", quote(s), f.remedy)
	} else if f.check != nil {
		problem = f.check(s)
	}
	if problem != "" {
		v.problem("%s", problem)
	}
	return s, problem == ""
}

func (v value) number(tag reflect.StructTag) (uint64, bool) {
	remedy := fmt.Sprintf("write a whole number between %s and %s", tag.Get("min"), tag.Get("max"))
	s, ok := v.scalar(remedy)
	if !ok {
		return 0, false
	}
	bound := func(name string) uint64 {
		n, _ := strconv.ParseUint(tag.Get(name), 10, 32)
		return n
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n < bound("min") || n > bound("max") || s[0] == '0' {
		v.problem("is %s: %s", quote(s), remedy)
		return 0, false
	}
	return n, true
}

// duration reads a duration with a unit, such as 500ms.
func (v value) duration(to *time.Duration, tag reflect.StructTag) bool {
	remedy := fmt.Sprintf("write a duration with its unit between %s and %s", tag.Get("min"), tag.Get("max"))
	s, ok := v.scalar(remedy)
	if !ok {
		return false
	}
	bound := func(name string) time.Duration {
		d, _ := time.ParseDuration(tag.Get(name))
		return d
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		if f, errNumber := strconv.ParseFloat(s, 64); errNumber == nil && f > 0 && f < math.MaxInt32 {
			v.problem("is %s, which has no unit: write %ss or %sms", quote(s), s, s)
			return false
		}
	}
	// time.ParseDuration also accepts 0 without a unit and a signed zero.
	if err != nil || d < bound("min") || d > bound("max") || s[0] == '-' || strings.TrimLeft(s, "+0") == "" {
		v.problem("is %s: %s", quote(s), remedy)
		return false
	}
	*to = d
	return true
}

func (v value) vip(to *vip.VIP) bool {
	s, ok := v.scalar("write a VIP such as 20.0.0.1/32 or 2000::1/128")
	if !ok {
		return false
	}
	x, err := vip.Parse(s)
	if err != nil {
		v.problem("%v", err)
		return false
	}
	*to = x
	return true
}

// address reads a host address.
func (v value) address(to *netip.Addr) bool {
	s, ok := v.scalar("write an IP address such as 172.16.1.1")
	if !ok {
		return false
	}
	x, err := netip.ParseAddr(s)
	p, prefixErr := netip.ParsePrefix(s)
	what, remedy := vip.NotHost(x)
	switch {
	case prefixErr == nil:
		v.problem("is %s, which has a prefix length: write %s", quote(s), p.Addr())
	case err != nil:
		v.problem("is %s, not an IP address: write one such as 172.16.1.1", quote(s))
	case x.Zone() != "": // quote it: a zone can be any text
		v.problem("is %s, which has a zone: write an address that needs none", quote(s))
	case what != "":
		v.problem("is %s, %s: %s", x, what, remedy)
	default:
		*to = x
		return true
	}
	return false
}
