package lab

import (
	"net/netip"
	"os"
	"regexp"
	"testing"

	"github.com/vipgate/vipgate/pkg/speakerconfig"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/test/harness"
)

const speakersDocument = "../../docs/speakers.md"

var speakerPattern = regexp.MustCompile("(?m)^```[a-z]+ speaker-config=(\\S+)\n((?s:.*?))^```$")

// The configurations in docs/speakers.md are the output of speaker-config, with the arguments of
// its first block, for the trench file of docs/gateways.md.
func TestSpeakersDocument(t *testing.T) {
	gateways, err := os.ReadFile(gatewaysDocument)
	harness.Must(t, err)
	example := yamlPattern.FindStringSubmatch(string(gateways))
	config, err := trenchfile.Parse("docs/gateways.md", []byte(example[2]), trench.DefaultDefaults())
	harness.Must(t, err)
	speaker := speakerconfig.Speaker{
		Address: netip.MustParseAddrPort("10.77.0.1:179"), Frontend: netip.MustParseAddr("10.77.0.2"),
		AS: 8103, FrontendAS: 8103, Gateways: config.Attractor.Gateways, Password: speakerconfig.Placeholder,
	}
	for _, v := range config.Attractor.VIPs {
		speaker.VIPs = append(speaker.VIPs, v.Prefix())
	}
	document, err := os.ReadFile(speakersDocument)
	harness.Must(t, err)
	blocks := 0
	text := speakerPattern.ReplaceAllStringFunc(string(document), func(block string) string {
		blocks++
		kind := speakerPattern.FindStringSubmatch(block)
		want, err := speaker.Text(kind[1])
		harness.Must(t, err)
		if want != kind[2] && !*update {
			t.Errorf("the block of %s is\n%s\nbut speaker-config prints\n%s\nrun go test ./test/lab -run "+
				"TestSpeakersDocument -update", kind[1], kind[2], want)
		}
		return "```text speaker-config=" + kind[1] + "\n" + want + "```"
	})
	if *update && !t.Failed() {
		harness.Must(t, os.WriteFile(speakersDocument, []byte(text), 0o644))
	}
	if blocks == 0 {
		t.Error("the document has no configuration")
	}
}
