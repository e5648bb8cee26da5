package trench

import (
	"errors"
	"net/url"
	"path/filepath"
	"regexp"
	"regexp/syntax"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of texts of a check.
const (
	maxPath    = 1000
	maxBody    = 1000
	maxService = 200
	maxHost    = 253 // RFC 1035 section 2.3.4, without the last dot
	maxRanges  = 20
)

const (
	digits  = "0123456789"
	letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)

// only reports whether the text has no other bytes than these.
func only(s, bytes string) bool { return strings.Trim(s, bytes) == "" }

// visible reports whether the text is visible ASCII, without a space.
func visible(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' })
}

// file reads the absolute path of a file.
func (v value) file(what, without string) string {
	s, ok := v.text("write the absolute path of the file, or remove the field " + without)
	if ok && (!filepath.IsAbs(s) || filepath.Clean(s) == "/") {
		v.problem("is %s: write the absolute path of %s", quote(s), what)
	}
	return s
}

// request parses the first line of an HTTP request.
func (v value) request() string {
	const remedy = "write a path such as /healthz or /healthz?full=1, in at most 1000 characters of ASCII, others and spaces as %20"
	s, ok := v.text(remedy)
	if !ok {
		return ""
	}
	if s[0] != '/' || len(s) > maxPath || !visible(s) || strings.Contains(s, "#") {
		v.problem("is %s: %s", quote(s), remedy)
	} else if _, err := url.ParseRequestURI(s); err != nil {
		v.problem("is %s, in which a %% is not followed by two hexadecimal digits: write %%25 for a percent sign", quote(s))
	}
	return s
}

// host reads a Host header: a name or address, and perhaps a port.
func (v value) host() string {
	const remedy = "write a name or address such as example.org, 10.0.0.1:8080 or [fd00::1]:8080, in ASCII"
	s, ok := v.text(remedy)
	if !ok {
		return ""
	}
	host, port := s, ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		host, port = s[:i], s[i+1:]
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || port[0] == '0' {
			v.problem("is %s, which has no port between 1 and 65535 behind the colon: %s", quote(s), remedy)
			return s
		}
	}
	name := host != "" && only(host, letters+digits+"_.-")
	inner, bracket := strings.CutPrefix(host, "[")
	inner, closed := strings.CutSuffix(inner, "]")
	literal := bracket && closed && strings.Contains(inner, ":") && only(inner, digits+"ABCDEFabcdef:.")
	if len(host) > maxHost || !name && !literal {
		v.problem("is %s: %s", quote(s), remedy)
	}
	return s
}

// serverName reads a name or an address that a certificate has.
func (v value) serverName() string {
	const remedy = "write the name or address that the certificate has, such as example.org, in ASCII"
	s, ok := v.text(remedy)
	if ok && (len(s) > maxHost || !only(s, letters+digits+"_.:-")) {
		v.problem("is %s: %s", quote(s), remedy)
	}
	return s
}

func (v value) service() string {
	const remedy = "write the name of a service in 1 to 200 characters of ASCII without a space, or remove the field for the whole server"
	s, ok := v.text(remedy)
	if ok && (len(s) > maxService || !visible(s)) {
		v.problem("is %s: %s", quote(s), remedy)
	}
	return s
}

// body reads a regular expression. It is kept as text so that checks stay comparable.
func (v value) body() string {
	const remedy = "write a regular expression (RE2) of 1 to 1000 characters, or remove the field to take any body"
	s, ok := v.text(remedy)
	if !ok {
		return ""
	}
	if utf8.RuneCountInString(s) > maxBody {
		v.problem("has %d characters: %s", utf8.RuneCountInString(s), remedy)
		return s
	}
	if _, err := regexp.Compile(s); err != nil {
		var what *syntax.Error
		if errors.As(err, &what) {
			v.problem("is %s, no regular expression (RE2): %s at %s: change it, or write \\Q before text that is meant literally", quote(s), what.Code, quote(what.Expr))
		} else {
			v.problem("is %s, no regular expression (RE2): change it", quote(s))
		}
	}
	return s
}

// status reads numbers and ranges.
func (v value) status() string {
	const remedy = "write numbers and ranges between 200 and 599, such as \"200-399,404\", at most 20"
	s, ok := v.text(remedy)
	if !ok {
		return ""
	}
	n := 0
	for part := range strings.SplitSeq(s, ",") {
		n++
		lo, hi, ok := statusRange(part)
		if !ok || n > maxRanges {
			v.problem("is %s: %s", quote(s), remedy)
			return s
		}
		if lo > hi {
			v.problem("has the range %s, whose end lies before its begin: write %d-%d", part, hi, lo)
			return s
		}
	}
	return s
}

// statusRange reads "404" or "200-399".
func statusRange(s string) (lo, hi int, ok bool) {
	first, last, isRange := strings.Cut(s, "-")
	lo, ok = statusCode(first)
	if hi = lo; ok && isRange {
		hi, ok = statusCode(last)
	}
	return lo, hi, ok
}

// statusCode reads the status of a final answer (RFC 9110 section 15).
func statusCode(s string) (int, bool) {
	if len(s) != 3 || !only(s, digits) || s[0] < '2' || s[0] > '5' {
		return 0, false
	}
	return int(s[0]-'0')*100 + int(s[1]-'0')*10 + int(s[2]-'0'), true
}

// Wants reports whether Status names the status of an answer.
func (c HTTPCheck) Wants(status int) bool {
	for part := range strings.SplitSeq(c.Status, ",") {
		if lo, hi, ok := statusRange(part); ok && lo <= status && status <= hi {
			return true
		}
	}
	return false
}

func (v value) families() Families {
	const remedy = "write ipv4, ipv6 or both"
	s, ok := v.text(remedy)
	for _, f := range []Families{BothFamilies, OnlyIPv4, OnlyIPv6} {
		if s == f.String() {
			return f
		}
	}
	if ok {
		v.problem("is %s: %s", quote(s), remedy)
	}
	return BothFamilies
}

// String returns "both", "ipv4" or "ipv6", as in the file.
func (f Families) String() string {
	switch f {
	case BothFamilies:
		return "both"
	case OnlyIPv4:
		return "ipv4"
	case OnlyIPv6:
		return "ipv6"
	}
	return "Families(" + strconv.Itoa(int(f)) + ")"
}

// people names the one family.
func (f Families) people() string {
	if f == OnlyIPv4 {
		return "IPv4"
	}
	return "IPv6"
}
