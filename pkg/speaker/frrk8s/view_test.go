package frrk8s

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestView(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trench.yaml"+Suffix)
	view := NewView(path)
	_, _, err := view.Sessions(t.Context())
	harness.WantError(t, err, "which kube writes")

	write := func(written time.Time, sessions ...Session) {
		text, err := json.Marshal(File{Written: written, Node: "node-1", Sessions: sessions})
		harness.Must(t, err)
		harness.Must(t, os.WriteFile(path, text, 0o600))
	}
	write(time.Now(), Session{Peer: "192.0.2.1", State: "Established", BFD: "N/A"},
		Session{Peer: "2001-0db8-0000-0000-0000-0000-0000-0001", State: "Active"}, Session{Peer: "eth1", State: "Idle"})
	version, got, err := view.Sessions(t.Context())
	harness.Must(t, err)
	var want []speaker.Session
	for _, s := range []speaker.Session{
		{Peer: netip.MustParseAddr("192.0.2.1"), Up: true, State: "Established"},
		{Peer: netip.MustParseAddr("2001:db8::1"), State: "Active"},
		{Name: "eth1", State: "Idle"},
	} {
		for _, family := range vip.Families {
			s.Family, s.Exported = family, -1
			want = append(want, s)
		}
	}
	if version != "frr-k8s on node-1" || !slices.Equal(got, want) {
		t.Errorf("%s: got %+v, want %+v", version, got, want)
	}
	if _, err := view.Exported(t.Context(), netip.Addr{}, vip.IPv4); !errors.Is(err, speaker.ErrUnknown) {
		t.Errorf("exported: %v", err)
	}

	for _, age := range []time.Duration{MaxAge + time.Minute, -MaxAge - time.Minute} {
		write(time.Now().Add(-age))
		_, _, err = view.Sessions(t.Context())
		harness.WantError(t, err, " old; see the status of kube")
	}
	harness.Must(t, os.WriteFile(path, []byte("{"), 0o600))
	_, _, err = view.Sessions(t.Context())
	harness.WantError(t, err, "failed to read the sessions of frr-k8s in "+path)
}

// FuzzView reads any list of sessions in a file of now: an error, or both families of each session.
func FuzzView(f *testing.F) {
	f.Add([]byte(`[{"peer":"192.0.2.1","state":"Established"},{"peer":"2001-0db8-0000-0000-0000-0000-0000-0001"}]`))
	f.Add([]byte(`[{"peer":"eth1","state":"Idle","bfd":"N/A"}, null, {}]`))
	f.Add([]byte(`[{"peer":"fe80::1%eth0-1"}]`))
	f.Add([]byte(`{`))
	view := NewView(filepath.Join(f.TempDir(), "trench.yaml"+Suffix))
	f.Fuzz(func(t *testing.T, sessions []byte) {
		written, err := json.Marshal(time.Now())
		harness.Must(t, err)
		text := slices.Concat([]byte(`{"written":`), written, []byte(`,"sessions":`), sessions, []byte("}"))
		harness.Must(t, os.WriteFile(view.path, text, 0o600))
		_, got, err := view.Sessions(t.Context())
		if err != nil && got != nil {
			t.Errorf("%v, with sessions %v", err, got)
		}
		for i, session := range got {
			if len(got)%len(vip.Families) != 0 || session.Family != vip.Families[i%len(vip.Families)] ||
				session.Peer.IsValid() && session.Name != "" {
				t.Errorf("session %d: %+v", i, session)
			}
		}
	})
}
