// Package frrk8s is the view of the FRR that frr-k8s runs on a node, from the BGPSessionState
// objects of the node. kube reads these and writes them into a file, because the frontend does not
// use the Kubernetes API.
//
// The objects have the state of each session and nothing else: whether a gateway has a VIP stays
// unknown. frr-k8s refreshes them every two minutes by default, and they bear no time, so that a
// lost session may be seen that late.
package frrk8s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/speaker"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// Suffix is appended to the path of the trench file for the file of the sessions.
	Suffix = ".sessions"
	// WriteInterval is the longest time between two writes of the file.
	WriteInterval = 10 * time.Second
	// MaxAge is the age from which the file says nothing: kube or its watch has failed.
	MaxAge = 3 * WriteInterval

	maxSize = 1 << 20
	// established is the state of a session, as FRR writes it.
	established = "Established"
)

// File is the content of the file, as JSON.
type File struct {
	Written  time.Time `json:"written"`
	Node     string    `json:"node"`
	Sessions []Session `json:"sessions"`
}

// Session is the status of one BGPSessionState.
type Session struct {
	Peer  string `json:"peer"` // an address or an interface
	State string `json:"state"`
	BFD   string `json:"bfd,omitempty"`
}

// View reads the file. It implements speaker.LateView.
type View struct{ path string }

var _ speaker.LateView = View{}

// NewView returns the view of the sessions in a file.
func NewView(path string) View { return View{path} }

// Sessions implements speaker.View. It returns both families of each session, since the negotiated
// ones are unknown.
func (view View) Sessions(context.Context) (version string, list []speaker.Session, err error) {
	file, err := view.read()
	if err != nil {
		return "", nil, err
	}
	for _, session := range file.Sessions {
		for _, family := range vip.Families {
			peer, name := peerOf(session.Peer)
			list = append(list, speaker.Session{
				Peer: peer, Name: name, Family: family, Up: session.State == established, State: session.State, Exported: -1,
			})
		}
	}
	return "frr-k8s on " + file.Node, list, nil
}

// Exported implements speaker.View. It returns [errors.ErrUnsupported].
func (View) Exported(context.Context, netip.Addr, vip.Family) (vip.Set, error) {
	return nil, fmt.Errorf("BGPSessionState has no prefixes: %w", errors.ErrUnsupported)
}

// Late implements speaker.LateView.
func (View) Late() {}

func (view View) read() (file File, err error) {
	f, err := os.Open(view.path)
	if err != nil {
		return File{}, fmt.Errorf("failed to read the sessions of frr-k8s, which kube writes: %w", err)
	}
	defer f.Close()
	if err := json.NewDecoder(io.LimitReader(f, maxSize)).Decode(&file); err != nil {
		return File{}, fmt.Errorf("failed to read the sessions of frr-k8s in %s: %w", view.path, err)
	}
	// A future time is a clock that was set back.
	if age := time.Since(file.Written); age > MaxAge || age < -MaxAge {
		return File{}, fmt.Errorf("the sessions of frr-k8s in %s are %s old; see the status of kube", view.path,
			age.Truncate(time.Second))
	}
	return file, nil
}

// peerOf returns the address or the interface of a peer. frr-k8s writes all groups of an IPv6
// address, separated by "-", because the peer is also a label.
func peerOf(text string) (address netip.Addr, name string) {
	if address, err := netip.ParseAddr(text); err == nil {
		return address, ""
	}
	if address, err := netip.ParseAddr(strings.ReplaceAll(text, "-", ":")); err == nil {
		return address, ""
	}
	return netip.Addr{}, text
}
