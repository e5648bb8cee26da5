package trench

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Field describes a field that an object of the file can have.
type Field struct {
	reflect.StructField
	// Key is the name in the file.
	Key      string
	Required bool

	index    []int // of embedded structs, too
	min, max int64
	form     form
	protocol string
}

// fieldsByType caches the fields of each type, because parsing tags is slow.
var fieldsByType sync.Map

// FieldsOf returns the fields of a struct type, in the order of the file.
func FieldsOf(object reflect.Type) []Field {
	if cached, ok := fieldsByType.Load(object); ok {
		return cached.([]Field)
	}
	var fields []Field
	for i := range object.NumField() {
		structField := object.Field(i)
		if structField.Anonymous {
			for _, field := range FieldsOf(structField.Type) {
				field.index = append([]int{i}, field.index...)
				fields = append(fields, field)
			}
			continue
		}
		key, option, _ := strings.Cut(structField.Tag.Get("yaml"), ",")
		// Fields such as Digest are not in the file.
		if key == "" {
			continue
		}
		tag := structField.Tag
		if structField.Type == membersType {
			structField.Type = listType
		}
		fields = append(fields, Field{
			StructField: structField, Key: key, Required: option == "required", index: []int{i},
			min: bound(tag.Get("min")), max: bound(tag.Get("max")),
			form: forms[tag.Get("form")], protocol: tag.Get("only"),
		})
	}
	fieldsByType.Store(object, fields)
	return fields
}

// bound parses the bound of a number or of a duration.
func bound(text string) int64 {
	if duration, err := time.ParseDuration(text); err == nil {
		return int64(duration)
	}
	limit, _ := strconv.ParseInt(text, 10, 64)
	return limit
}

// Of returns the value of the field in an object; of [Members], a copy of the list for Set.
func (field *Field) Of(object reflect.Value) reflect.Value {
	value := object.FieldByIndex(field.index)
	if value.Type() != membersType {
		return value
	}
	list := value.Interface().(Members).List()
	return reflect.ValueOf(&list).Elem()
}

// Set stores a value of the field in an object.
func (field *Field) Set(object, value reflect.Value) {
	if value.Type() == listType {
		list := value.Interface().([MaxMembers]SingleCheck)
		value = reflect.ValueOf(MembersOf(list[:]...))
	}
	object.FieldByIndex(field.index).Set(value)
}

// Default returns the default of a field whose zero value is not its default: zero is a value of
// its own. It reports whether the field has such a default.
func (field *Field) Default() (value reflect.Value, ok bool) {
	text := field.Tag.Get("default")
	if text == "" || field.Type != durationType || field.min > 0 {
		return value, false
	}
	value = reflect.New(field.Type).Elem()
	return value, field.Parse(text, value) == Problem{}
}

// Pattern returns the pattern of a text.
func (field *Field) Pattern() string { return field.form.pattern().String() }

// Remedy returns how to write the value of the field, or of an item of its list.
func (field *Field) Remedy() string {
	if field.form.pattern != nil {
		return field.form.remedy
	}
	item := field.Type
	if item.Kind() == reflect.Slice || item.Kind() == reflect.Array {
		item = item.Elem()
	}
	switch value := reflect.Zero(item).Interface().(type) {
	case vip.VIP:
		return "write a VIP such as 20.0.0.1/32 or 2000::1/128"
	case netip.Addr:
		return "write an IP address such as 172.16.1.1"
	case time.Duration:
		return fmt.Sprintf("write a duration with its unit between %s and %s", field.Tag.Get("min"), field.Tag.Get("max"))
	case enumeration:
		names := slices.DeleteFunc(value.Names(), func(name string) bool { return name == "" })
		last := len(names) - 1
		return "write " + strings.Join(names[:last], ", ") + " or " + names[last]
	case bool:
		return "write true or false"
	}
	return fmt.Sprintf("write a whole number between %s and %s", field.Tag.Get("min"), field.Tag.Get("max"))
}

// enumeration is a number that has names in the file.
type enumeration interface{ Names() []string }

// Types of values that are not read by their kind.
var (
	VIPType      = reflect.TypeFor[vip.VIP]()
	AddressType  = reflect.TypeFor[netip.Addr]()
	durationType = reflect.TypeFor[time.Duration]()
	numberType   = reflect.TypeFor[int64]()
	membersType  = reflect.TypeFor[Members]()
	listType     = reflect.TypeFor[[MaxMembers]SingleCheck]()
)

// TooMany returns the problem of a list that has more items than the field permits.
func (field *Field) TooMany(items int) Problem {
	if field.max == 0 || field.Tag.Get("min") != "" || int64(items) <= field.max { // min and max of each item
		return Problem{}
	}
	return newProblem(fmt.Sprintf("has %d items", items), fmt.Sprintf("write %d at most", field.max))
}

// Parse stores the value of a text in the field, or in an item of its list. It stores nothing if
// the result is a problem, whose Path is empty.
func (field *Field) Parse(text string, to reflect.Value) Problem {
	shown := "is " + Quote(text)
	// An invalid text must not change the field.
	parsed := reflect.New(to.Type()).Elem()
	switch value := parsed.Addr().Interface().(type) {
	case *vip.VIP:
		prefix, err := vip.Parse(text)
		if err != nil {
			return Problem{Text: err.Error()} // with a remedy
		}
		*value = prefix
	case *netip.Addr:
		if prefix, err := netip.ParsePrefix(text); err == nil {
			return newProblem(shown+", which has a prefix length", fmt.Sprint("write ", prefix.Addr()))
		}
		address, err := netip.ParseAddr(text)
		if err != nil {
			return newProblem(shown+", not an IP address", "write one such as 172.16.1.1")
		}
		*value = address
	case *time.Duration:
		duration, err := time.ParseDuration(text)
		if number, errNumber := strconv.ParseFloat(text, 64); err != nil && errNumber == nil && number > 0 &&
			number < math.MaxInt32 {
			return newProblem(shown+", which has no unit", fmt.Sprintf("write %ss or %sms", text, text))
		}
		// time.ParseDuration also accepts 0 without a unit and a signed zero.
		if err != nil || text[0] == '-' || strings.TrimLeft(text, "+0") == "" {
			return field.invalid(text)
		}
		*value = duration
	case *bool:
		if text != "true" && text != "false" {
			return field.invalid(text)
		}
		*value = text == "true"
	case *string:
		*value = text
	default:
		if !field.parseNumber(text, parsed) {
			return field.invalid(text)
		}
	}
	if problem := field.check(parsed, text); problem != (Problem{}) {
		return problem
	}
	to.Set(parsed)
	return Problem{}
}

// parseNumber stores a number, or the number of a name, and reports whether the text is valid.
func (field *Field) parseNumber(text string, to reflect.Value) bool {
	if enum, ok := to.Interface().(enumeration); ok {
		position := slices.Index(enum.Names(), text)
		to.SetUint(uint64(max(0, position)))
		return position >= 0
	}
	// Check the bounds before the conversion to a type that may be smaller.
	number, err := strconv.ParseUint(text, 10, 63)
	if err != nil || text[0] == '0' && text != "0" || int64(number) < field.min || int64(number) > field.max {
		return false
	}
	if to.CanUint() {
		to.SetUint(number)
	} else {
		to.SetInt(int64(number))
	}
	return true
}

// invalid returns the problem of a value that is shown as text.
func (field *Field) invalid(text string) Problem {
	return Problem{Text: "is " + Quote(text), Remedy: field.Remedy()}
}

// check returns the problem of a value. text is the value as the user wrote it, or "".
func (field *Field) check(value reflect.Value, text string) Problem {
	switch value.Kind() {
	case reflect.Struct:
		if address, ok := value.Interface().(netip.Addr); ok {
			if field.Tag.Get("loopback") != "" && address.IsLoopback() && address.Zone() == "" && !address.Is4In6() {
				return Problem{}
			}
			return checkAddress(address)
		}
	case reflect.String:
		text := value.String()
		switch {
		case text == "" && field.Required:
			return newProblem("is empty", field.form.remedy)
		case text == "": // left out
		case !field.form.pattern().MatchString(text):
			return field.invalid(text)
		case field.form.check != nil:
			return field.form.check(text)
		}
	case reflect.Bool:
	default:
		// Only the text that the user wrote has the unit that the user chose.
		_, named := value.Interface().(enumeration)
		if number, _ := value.Convert(numberType).Interface().(int64); !named && (number < field.min || number > field.max) {
			return field.invalid(cmp.Or(text, fmt.Sprint(value.Interface())))
		}
	}
	return Problem{}
}

// Quote quotes a text of the file and truncates a long one.
func Quote(text string) string {
	const enough = 100
	if len(text) > enough {
		text = strings.ToValidUTF8(text[:enough], "") + "…"
	}
	return strconv.Quote(text)
}

type form struct {
	// pattern compiles on first use: all patterns together take 20 ms and 3.5 MB, at each start of
	// each program.
	pattern func() *regexp.Regexp
	remedy  string
	// check returns the problem of a text that matches the pattern. Optional.
	check func(text string) Problem
}

func newForm(pattern, remedy string, check func(text string) Problem) form {
	return form{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) }), remedy, check}
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
	"password file": newForm(pathPattern,
		"write the absolute path of the file with the password, or remove the field for no password", nil),
	"CA file": newForm(pathPattern,
		"write the absolute path of the PEM file with the authorities, or remove the field for the system's", nil),
	"certificate file": newForm(pathPattern,
		"write the absolute path of the PEM file with the client certificate, or remove the field", nil),
	"key file": newForm(pathPattern,
		"write the absolute path of the PEM file with the private key, or remove the field", nil),
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
	"method": newForm(`^(GET|HEAD|OPTIONS|POST|PUT)$`, "write GET, HEAD, OPTIONS, POST or PUT", nil),
	"header": newForm("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}: ?[!-~]([ -~]{0,998}[!-~])?$",
		`write a name and a value in ASCII, such as "Accept: text/plain"`, checkHeader),
	"payload": newForm(`^[\s\S]{1,1000}$`,
		"write a text of 1 to 1000 bytes, or bytes such as hex:00ff", checkPayload),
	"domain": newForm(`^(\.|([!-\-/-\[\]-~]{1,63}\.)*[!-\-/-\[\]-~]{1,63}\.?)$`,
		"write a name such as example.org, in ASCII", checkDomain),
	"record type": newForm(`^(A|AAAA|CNAME|MX|NS|PTR|SOA|SRV|TXT)$`,
		"write A, AAAA, CNAME, MX, NS, PTR, SOA, SRV or TXT", nil),
	"rcode": newForm(`^(NOERROR|FORMERR|SERVFAIL|NXDOMAIN|NOTIMP|REFUSED)$`,
		"write NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP or REFUSED", nil),
	"dns transport": newForm(`^(udp|tcp)$`, "write udp or tcp", nil),
	"confirmation": newForm(`^[ctv][0-9a-f]{8}(,[ctv][0-9a-f]{8})*$`,
		"write an identifier that the status shows, such as v1f3a5b7c, or remove the field", nil),
	"community": newForm(`^[0-9]{1,5}:[0-9]{1,5}$|^[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$`,
		communityRemedy, checkCommunity),
	"transport": newForm(`^(tcp|udp|sctp)$`, "write tcp, udp or sctp", nil),
}

func checkInterface(name string) Problem {
	if name == "." || name == ".." {
		return newProblem("is "+Quote(name)+", which no interface can be called", "write the name that ip link shows")
	}
	return Problem{}
}

func checkRequest(path string) Problem {
	if _, err := url.ParseRequestURI(path); err != nil {
		return newProblem("is "+Quote(path)+", in which a % is not followed by two hexadecimal digits",
			"write %25 for a percent sign")
	}
	return Problem{}
}

func checkStatus(status string) Problem {
	for part := range strings.SplitSeq(status, ",") {
		if low, high, isRange := strings.Cut(part, "-"); isRange && low > high {
			return newProblem("has the range "+part+", whose end lies before its begin", "write "+high+"-"+low)
		}
	}
	return Problem{}
}

// checkASN rejects the reserved AS numbers.
func checkASN(asn int64) Problem {
	const remedy = "write the AS number of that side"
	switch asn {
	case 0:
		return newProblem("is 0, which is reserved (RFC 7607)", remedy)
	case 23456:
		return newProblem("is 23456, which stands for 4-octet AS numbers (RFC 6793)", "write the AS number itself")
	case 65535, math.MaxUint32:
		return newProblem(fmt.Sprintf("is %d, which is reserved (RFC 7300)", asn), remedy)
	}
	return Problem{}
}

// checkHoldTime rejects a hold time that BGP does not allow (RFC 4271 section 4.2).
func checkHoldTime(hold time.Duration) Problem {
	if hold < 3*time.Second || hold > 65535*time.Second || hold%time.Second != 0 {
		return newProblem("is "+hold.String(), "BGP wants whole seconds between 3s and 65535s (RFC 4271)")
	}
	return Problem{}
}

// checkAddress rejects an address that no host can have.
func checkAddress(address netip.Addr) Problem {
	kind, remedy := vip.NotHost(address)
	switch {
	case !address.IsValid():
		return newProblem("is empty", "write an IP address such as 172.16.1.1")
	case address.Zone() != "": // quote it: a zone can be any text
		return newProblem("is "+Quote(address.String())+", which has a zone", "write an address that needs none")
	case kind != "":
		return newProblem(fmt.Sprintf("is %s, %s", address, kind), remedy)
	}
	return Problem{}
}
