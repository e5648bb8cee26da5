package durable

import (
	"encoding/json"
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	data, err := json.Marshal(Duration(90 * time.Second))
	if err != nil || string(data) != `"1m30s"` {
		t.Errorf("stored as %s, %v", data, err)
	}
	var d Duration
	if err := json.Unmarshal(data, &d); err != nil || d != Duration(90*time.Second) {
		t.Errorf("read as %v, %v", d, err)
	}
	for _, bad := range []string{`""`, `"five"`, `"-5s"`, `5`} {
		if err := json.Unmarshal([]byte(bad), &d); err == nil {
			t.Errorf("%s was accepted as %v", bad, d)
		}
	}
}
