package trench

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// objectTypes returns the types of the objects in a value of a type.
func objectTypes(of reflect.Type) (types []reflect.Type) {
	for slices.Contains([]reflect.Kind{reflect.Slice, reflect.Array, reflect.Pointer}, of.Kind()) {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of == VIPType || of == AddressType {
		return nil
	}
	types = append(types, of)
	for _, field := range FieldsOf(of) {
		types = append(types, objectTypes(field.Type)...)
	}
	return types
}

// setLimit sets a field to a limit of its tag, or beyond it. It reports whether the type has such a
// value, and the path of the value.
func setLimit(t *testing.T, object reflect.Value, field *Field, limit string, beyond int64) (path string, ok bool) {
	t.Helper()
	text, value, path := field.Tag.Get(limit), field.Of(object), field.Key
	if text == "" {
		return path, false
	}
	number := bound(text) + beyond
	isList := value.Kind() == reflect.Slice || value.Kind() == reflect.Array
	switch {
	case isList && field.Tag.Get("min") == "" && value.Kind() == reflect.Array:
		if int64(value.Len()) != field.max {
			t.Errorf("%s.%s has room for %d items, and the limit is %d", object.Type(), path, value.Len(), field.max)
		}
		return path, false
	case isList && field.Tag.Get("min") == "":
		value.Set(reflect.MakeSlice(value.Type(), int(number), int(number)))
		return path, true
	case isList:
		value.Set(reflect.MakeSlice(value.Type(), 1, 1))
		value, path = value.Index(0), path+"[0]"
	}
	switch {
	case value.CanInt() && !value.OverflowInt(number):
		value.SetInt(number)
	case value.CanUint() && number >= 0 && !value.OverflowUint(uint64(number)):
		value.SetUint(uint64(number))
	case !value.CanInt() && !value.CanUint():
		t.Errorf("%s.%s has a limit, which nothing tests", object.Type(), path)
		return path, false
	default:
		return path, false
	}
	return path, true
}

// A file has 10 000 streams at most, which lb holds several times in 256 MiB.
func TestSizeOfStream(t *testing.T) {
	if size := reflect.TypeFor[Stream]().Size(); size > 1000 {
		t.Errorf("a stream takes %d bytes", size)
	}
}

// Members of a check are equal, and found, by their checks.
func TestMembers(t *testing.T) {
	one, two := SingleCheck{TCP: TCPCheck{Port: 1}}, SingleCheck{TCP: TCPCheck{Port: 2}}
	both := MembersOf(one, two)
	if MembersOf() != (Members{}) || MembersOf(one) == MembersOf(two) || both != MembersOf(one, two) {
		t.Error("members do not compare as their checks")
	}
	for members, want := range map[Members][MaxMembers]SingleCheck{{}: {}, MembersOf(one, two): {one, two}} {
		if list := members.List(); list != want {
			t.Errorf("list %+v", list)
		}
	}
}

// Every limit of a tag is one of Go values, whose origin need not be a file.
func TestLimitsOfTags(t *testing.T) {
	reports := func(object reflect.Value, path string) bool {
		result := validation{reported: map[string]bool{}}
		result.object("", object)
		return result.reported[path]
	}
	tried := map[string]bool{}
	for _, of := range objectTypes(reflect.TypeFor[Config]()) {
		for limit, outward := range map[string]int64{"min": -1, "max": 1} {
			fields := FieldsOf(of)
			for i := range fields {
				// Some limits depend on other fields: the object has all of its limits.
				object := reflect.New(of).Elem()
				for k := range fields {
					_, _ = setLimit(t, object, &fields[k], limit, 0)
				}
				name := strings.ToLower(of.Name()) + "." + fields[i].Key
				inside, hasLimit := setLimit(t, object, &fields[i], limit, 0)
				if hasLimit && reports(object, inside) {
					t.Errorf("%s of %s is refused", limit, name)
				}
				if path, ok := setLimit(t, object, &fields[i], limit, outward); ok {
					tried[limit+" of "+name] = true
					if !reports(object, path) {
						t.Errorf("beyond %s of %s is accepted", limit, name)
					}
				}
			}
		}
	}
	for _, name := range []string{
		"max of attributes.communities", "max of stream.match", "max of stream.earlier", "max of target.ips",
		"max of attractor.vips", "max of config.streams", "min of match.ports", "max of gateway.holdTime",
		"min of maglev.seed",
	} {
		if !tried[name] {
			t.Errorf("%s is not tried", name)
		}
	}
}
