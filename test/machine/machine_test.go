package machine

import "testing"

func TestCPUModel(t *testing.T) {
	got := cpuModel("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: other\n")
	if got != "Some CPU @ 2 GHz" {
		t.Errorf("model %q", got)
	}
	if got := cpuModel("nothing"); got != Unknown {
		t.Errorf("model %q", got)
	}
}
