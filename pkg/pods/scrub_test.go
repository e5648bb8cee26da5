package pods

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

func newMasker() *masker { return &masker{replaced: map[string]string{}} }

// object is an object of the API server.
type object = map[string]any

// podOf returns a pod with a label and a container that has secrets everywhere.
func podOf(label, container string) object {
	return object{
		"metadata": object{
			"labels": object{label: "trench-a"},
			"annotations": object{
				"vipgate.io/vips": "20.0.0.1", "token": "secret", "vipgate.io/checks": "secret",
				"kubectl.kubernetes.io/last-applied-configuration": "secret",
			},
			"managedFields": []any{object{}},
		},
		"spec": object{"containers": []any{object{
			"name": container, "image": "kept", "command": []any{"arg"}, "args": []any{"arg"},
			"env": []any{
				object{"name": "VIPGATE_SOCKET", "value": "var"}, object{"name": "PROXY", "value": "secret"},
			},
			"lifecycle":     object{"preStop": object{"exec": object{"command": []any{"arg"}}}},
			"livenessProbe": object{"httpGet": object{"httpHeaders": []any{object{"value": "arg"}}}},
		}}},
	}
}

func TestScrubContainers(t *testing.T) {
	for name, test := range map[string]struct {
		pod       object
		arguments bool // are kept
	}{
		"own container":                       {podOf(trenchLabel, LB), true},
		"other container of a trench pod":     {podOf(trenchLabel, "injected"), false},
		"application":                         {podOf("vipgate.io/trench", "web"), false},
		"application with our container name": {podOf("vipgate.io/trench", Frontend), false},
		"template of trench pods":             {object{"spec": object{"template": podOf(trenchLabel, Frontend)}}, true},
		"template of applications":            {object{"spec": object{"template": podOf("app", Frontend)}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			text := fmt.Sprint(newMasker().scrub(test.pod, false))
			for part, want := range map[string]bool{
				"secret": false, "managedFields": false, "arg]": test.arguments, "value:var": test.arguments,
				"20.0.0.1": true, "kept": true, "PROXY": true,
			} {
				if strings.Contains(text, part) != want {
					t.Errorf("contains %s: %v, want %v: %s", part, !want, want, text)
				}
			}
		})
	}
}

func TestMaskedChecks(t *testing.T) {
	for name, test := range map[string]struct{ check, want string }{
		"no headers": {`{"http":{"port":80,"path":"/healthz"}}`, `{"http":{"path":"/healthz","port":80}}`},
		"one header": {
			`{"http":{"headers":["Authorization: Bearer x"]}}`, `{"http":{"headers":["Authorization: ********"]}}`,
		},
		"two headers": {`{"http":{"headers":["A:b:c","D: e"]}}`, `{"http":{"headers":["A: ********","D: ********"]}}`},
		"query":       {`{"http":{"path":"/a?key=b?c","host":"h:1"}}`, `{"http":{"host":"h:1","path":"/a?********"}}`},
		"payload": {
			`{"udp":{"port":1,"send":"hex:00ff","expect":"x"}}`, `{"udp":{"expect":"********","port":1,"send":"********"}}`,
		},
		"members": {
			`{"any":[{"http":{"headers":["A: b"]}},{"tcp":{"port":1}}],"all":[{"udp":{"send":"s"}}]}`,
			`{"all":[{"udp":{"send":"********"}}],"any":[{"http":{"headers":["A: ********"]}},{"tcp":{"port":1}}]}`,
		},
		"source and TLS": {
			`{"tcp":{"port":1},"source":["10.0.0.1"],"http":{"tls":null}}`,
			`{"http":{"tls":null},"source":["10.0.0.1"],"tcp":{"port":1}}`,
		},
		"misspelled field":  {`{"http":{"header":["A: b"],"port":1}}`, `{"http":{"header":"********","port":1}}`},
		"header as a text":  {`{"http":{"headers":"secret"}}`, `{"http":{"headers":"********"}}`},
		"header as a field": {`{"http":{"headers":{"A":"b"}}}`, `{"http":{"headers":"********"}}`},
		"check as a text":   {`{"http":"secret"}`, `{"http":"********"}`},
		"numbers": {
			`{"udp":{"port":1,"send":8675309123,"expect":true},"http":{"headers":[12]}}`,
			`{"http":{"headers":["********"]},"udp":{"expect":"********","port":1,"send":"********"}}`,
		},
		"no object": {`["secret"]`, masked},
		"no JSON":   {`{"http":{"headers":["A: b"]}`, masked},
		"null":      {`null`, `null`},
	} {
		t.Run(name, func(t *testing.T) {
			service := object{"metadata": object{"annotations": object{"vipgate.io/check": test.check}}}
			// The record of the accepted form repeats the annotation.
			text, err := json.Marshal(service["metadata"])
			harness.Must(t, err)
			service["status"] = object{"conditions": []any{object{"message": string(text)}}}
			newMasker().scrub(service, false)
			got := service["metadata"].(object)["annotations"].(object)["vipgate.io/check"]
			if got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
			text, err = json.Marshal(service["metadata"])
			harness.Must(t, err)
			if got := service["status"].(object)["conditions"].([]any)[0].(object)["message"]; got != string(text) {
				t.Errorf("record: got %v, want %s", got, text)
			}
		})
	}
}

func TestMaskedTrenchFiles(t *testing.T) {
	for name, test := range map[string]struct{ file, want string }{
		"check": {
			"streams:\n  - check: {http: {port: 80, headers: ['A: b # c']}} # secret\n    name: s\n",
			"streams:\n- check:\n    http:\n      headers:\n      - 'A: ********'\n      port: 80\n  name: s\n",
		},
		"all other fields": {
			"attractor: {vips: [20.0.0.1/32], gateways: [{address: 10.0.0.1, bfd: {minTx: 1s}}]," +
				" policies: [{draining: {med: 1}}]}\n",
			"attractor:\n  gateways:\n  - address: 10.0.0.1\n    bfd:\n      minTx: 1s\n  policies:\n  - draining:\n" +
				"      med: 1\n  vips:\n  - 20.0.0.1/32\n",
		},
		"alias":        {"a: &x {udp: {send: secret}}\nstreams: [{check: *x}]\n", ""},
		"numeric keys": {"streams:\n  1: {check: {udp: {send: secret}}}\n", "streams: '********'\n"},
		"no YAML":      {"check: {udp: {send: secret}\n", masked},
		"list":         {"- secret\n", masked},
		"numbers": {
			"streams:\n- check: {udp: {port: 1, send: 8675309123, expect: 2024-01-01}}\n",
			"streams:\n- check:\n    udp:\n      expect: '********'\n      port: 1\n      send: '********'\n",
		},
		"empty": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			config := newMasker().scrub(object{"data": object{"trench.yaml": test.file, "key": "secret"}}, false)
			got, _ := config["data"].(object)["trench.yaml"].(string)
			if test.want != "" && got != test.want || strings.Contains(fmt.Sprint(config), "secret") {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
		})
	}
}

// A tenant's check blanks no words of other files, while secrets are masked there.
func TestWordsOfOtherFiles(t *testing.T) {
	for header, masks := range map[string]bool{
		"D: application/json": false, "E: TargetsReady": false, "F: 0123456789012345678": false,
		"F: 01234567890123456789": true, "Authorization: 0123456": false, "authorization: 01234567": true,
		"X-Session: 01234567": true, "X-Session: 0123456": false, "My-Credentials: 01234567": true,
		"X-Amz-Signature: 01234567": true, "Passphrase: 01234567": true, "Client-Secret: 01234567": true,
		// What others' objects show.
		"X-Key: vipgate.io/TargetsReady": false, "X-Key: TargetsR": false, "X-Key: web-of-others": false,
		"X-Key: 20.0.0.10": false, "X-Key: 20.0.0.10/32": false, "X-Key: 2001:db8::1": false, "reason: NoTarget": false,
	} {
		m := newMasker()
		m.scrub(object{
			"metadata": object{"name": "web-of-others"},
			"status":   object{"conditions": []any{object{"type": "vipgate.io/TargetsReady"}}},
		}, false)
		text, err := json.Marshal(object{
			"http": object{"headers": []string{header}}, "udp": object{"send": "a datagram of words"},
		})
		harness.Must(t, err)
		maskJSON(string(text), m.check)
		name, value, _ := strings.Cut(header, ": ")
		files := []File{{Content: fmt.Appendf(nil, "%s; a datagram of words; %s; is %q", value, header, header)}}
		m.finish(files)
		want := fmt.Sprintf("%[1]s; a datagram of words; %[2]s: %[1]s; is \"%[2]s: ********\"", value, name)
		if masks {
			want = strings.ReplaceAll(want, value, "********")
		}
		if got := string(files[0].Content); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// The time grows with the texts and the words, and not with their product.
func TestManyWordsAndSecrets(t *testing.T) {
	const count, many = 2_000, 20_000
	finished := func(texts, words int) time.Duration {
		least := time.Duration(math.MaxInt64)
		for range 3 {
			m := newMasker()
			for i := range texts {
				m.secret("X-Key: ", fmt.Sprintf("secret %d of a tenant", i))
			}
			for i := range words {
				m.words = append(m.words, fmt.Sprintf("application %d of a tenant", i))
			}
			begin := time.Now()
			m.finish(nil)
			least = min(least, time.Since(begin))
		}
		return least
	}
	texts, words, both := finished(count, 1), finished(1, many), finished(count, many)
	t.Logf("texts %v, words %v, both %v", texts, words, both)
	if both > 10*(texts+words) {
		t.Error("texts and words take a multiple of their single times")
	}
}

// A masked text is quoted as often as the text was.
func TestMaskedJSONIsValid(t *testing.T) {
	m := newMasker()
	maskJSON(`{"http":{"headers":["X-Note: short","X-Key: a\"b\\c0123"]}}`, m.check)
	content := func(note, key string) []byte {
		message, err := json.Marshal(object{"message": fmt.Sprintf("%q is refused", "X-Note: "+note)})
		harness.Must(t, err)
		text, err := json.Marshal([]any{
			object{"message": fmt.Sprintf("%q, %q", "X-Note: "+note, "X-Key: "+key)}, object{"log": string(message)},
		})
		harness.Must(t, err)
		return text
	}
	files := []File{{Content: content("short", `a"b\c0123`)}}
	m.finish(files)
	if got, want := files[0].Content, content(masked, masked); !bytes.Equal(got, want) || !json.Valid(got) {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Statuses, logs and failures quote secrets of the configuration in force.
func TestSysdumpMasksQuotedSecrets(t *testing.T) {
	long := strings.Repeat("0123456789", 20)
	file := "streams:\n- check: {http: {port: 80, path: '/h?token=a\"b', headers: ['X-Key: hunter22', 'X-Long: " +
		long + "']}}\n"
	source := &fakeSource{
		members: []Member{{Name: "a", Programs: map[string]string{LB: ""}}},
		output: map[string]string{
			"a lb dump":                 "# Configuration in force\n" + file + "\n# Interfaces\n1 lo up\n",
			"a lb status":               `is "X-Key: hunter22", GET /h?token=a"b; is "X-Long: ` + long[:92] + "…\"; ping\n",
			"a lb status --output=json": `{"problem": "is \"/h?token=a\\\"b\""}`,
		},
		failure: map[string]error{"a lb version": errors.New("no hunter22")},
	}
	files, err := Sysdump(t.Context(), source)
	harness.Must(t, err)
	kept := map[string]string{
		"a/lb/kernel.txt":  "# Interfaces\n1 lo up\n",
		"a/lb/status.txt":  `is "X-Key: ********", GET /h?********; is "X-Long: ********…"; ping`,
		"a/lb/status.json": `is \"/h?********\"`,
		"a/lb/version.txt": "no ********",
	}
	for _, file := range files {
		if !bytes.Contains(file.Content, []byte(kept[file.Name])) {
			t.Errorf("%s lacks %q:\n%s", file.Name, kept[file.Name], file.Content)
		}
		for _, secret := range []string{"hunter22", long[:20], "token="} {
			if bytes.Contains(file.Content, []byte(secret)) {
				t.Errorf("%s contains %s:\n%s", file.Name, secret, file.Content)
			}
		}
	}
}
