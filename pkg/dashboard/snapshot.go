package dashboard

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/pods"
	"github.com/vipgate/vipgate/pkg/status"
)

// maxObjects is the number of objects in each table. Those with problems come first.
const maxObjects = 50

// The levels of a state, in the order of the tables.
const (
	bad = iota
	warning
	unknown
	good
)

type snapshot struct {
	Time     time.Time `json:"time"`
	Trench   string    `json:"trench"`
	Error    string    `json:"error"`
	Pods     []podRow  `json:"pods"`
	VIPs     section   `json:"vips"`
	Gateways section   `json:"gateways"`
	Targets  section   `json:"targets"`
	Events   []event   `json:"events"`
}

type podRow struct {
	Name     string    `json:"name"`
	Level    int       `json:"level"`
	Problems []string  `json:"problems"`
	Frontend seen      `json:"frontend"`
	LB       seen      `json:"lb"`
	Gone     time.Time `json:"gone,omitzero"`
}

type seen struct {
	At  time.Time `json:"at,omitzero"`
	Old bool      `json:"old"`
}

// section is one table: the objects that match the query, at most maxObjects.
type section struct {
	Levels   [4]int    `json:"levels"` // number of objects by level
	Matching int       `json:"matching"`
	Groups   []group   `json:"groups"`
	Objects  []*object `json:"objects"`
	byName   map[string]*object
	members  map[group]map[*object]bool
}

// group counts the objects with an equal state in any pod.
type group struct {
	Level              int
	State, Cause, Next string
	Count              int
}

// object is a VIP, a gateway or an address of a target.
type object struct {
	Name   string `json:"name"`
	Detail string `json:"detail"`
	Level  int    `json:"level"`
	Parts  []part `json:"parts"`
}

type part struct {
	Pod   string    `json:"pod"`
	Level int       `json:"level"`
	State string    `json:"state"`
	Cause string    `json:"cause"`
	Via   string    `json:"via"`
	Since time.Time `json:"since,omitzero"`
}

type event struct {
	Time    time.Time `json:"time,omitzero"`
	Pod     string    `json:"pod"`
	Program string    `json:"program"`
	Object  string    `json:"object"`
	From    string    `json:"from"`
	To      string    `json:"to"`
	Detail  string    `json:"detail"`
}

// merge returns the kept events with a batch, ordered by time. The time of a note is its arrival.
func merge(kept []event, batch []pods.Event, now time.Time) []event {
	all := slices.Clone(kept)
	for _, e := range batch {
		if e.Event == nil {
			all = append(all, event{Time: now, Pod: e.Pod, Program: e.Program, Detail: e.Note})
			continue
		}
		all = append(all, event{
			timeOf(e.GetTime()), e.Pod, e.Program, e.GetObject(), status.EventWord(e.GetFrom()), status.EventWord(e.GetTo()),
			status.EventDetail(e.Event),
		})
	}
	slices.SortStableFunc(all, func(a, b event) int { return a.Time.Compare(b.Time) })
	return all[max(0, len(all)-maxEvents):]
}

// snapshot renders the state at a time, with the objects that contain query.
func (s state) snapshot(now time.Time, query string) *snapshot {
	page := &snapshot{Time: now, Pods: []podRow{}, Events: append([]event{}, s.events...)}
	if s.err != nil {
		page.Error = s.err.Error()
	}
	for _, p := range s.pods {
		row := podRow{
			Name: p.name, Gone: p.gone, Level: unknown,
			Frontend: seen{p.frontend.at, s.isOld(p.frontend.at, p.frontend.failed, now)},
			LB:       seen{p.lb.at, s.isOld(p.lb.at, p.lb.failed, now)},
		}
		if p.gone.IsZero() {
			row.Level, row.Problems = row.judge(p)
			page.Trench = cmp.Or(page.Trench, p.frontend.status.GetTrench(), p.lb.status.GetTrench())
			page.addFrontend(p.name, p.frontend.status, row.Frontend.Old, now)
			page.addLB(p.name, p.lb.status, row.LB.Old, now)
		}
		page.Pods = append(page.Pods, row)
	}
	for _, of := range []*section{&page.VIPs, &page.Gateways, &page.Targets} {
		of.finish(query)
	}
	return page
}

// isOld reports whether the last answer of a program does not describe its present state.
func (s state) isOld(at time.Time, failed bool, now time.Time) bool {
	return s.err != nil || failed || now.Sub(at) > staleAfter
}

// judge returns the level and the problems of a pod. Problems in an old answer may be over.
func (row podRow) judge(p pod) (level int, problems []string) {
	if p.frontend.at.IsZero() && p.lb.at.IsZero() && len(p.problems) == 0 {
		return unknown, []string{"no answer yet"}
	}
	present := status.Pod{Name: p.name, Problems: slices.Clone(p.problems)}
	if !row.Frontend.Old {
		present.Frontend = p.frontend.status
	} else if !p.frontend.failed {
		present.Problems = append(present.Problems, "frontend does not answer")
	}
	if !row.LB.Old {
		present.LB = p.lb.status
	} else if !p.lb.failed {
		present.Problems = append(present.Problems, "lb does not answer")
	}
	if problems = present.AllProblems(); len(problems) > 0 {
		return bad, problems
	}
	return good, nil
}

func (page *snapshot) addFrontend(pod string, answered *frontendv1.Status, old bool, now time.Time) {
	for _, vip := range answered.GetVips() {
		state, explanation := status.Advertisement(vip), status.Explain(vip.GetReason())
		p := part{pod, bad, state, status.VIPReason(vip, now), strings.Join(vip.GetGateways(), ", "), timeOf(vip.GetSince())}
		switch {
		case state == "announced" && p.Via == "":
			p.Level, p.Cause = warning, "no gateway is known to receive it yet"
		case state == "announced":
			p.Level, p.Cause = good, ""
		case state == "de-preferred":
			p.Level = warning
		}
		page.VIPs.add(vip.GetVip(), "", p, old, explanation)
	}
	for _, gateway := range answered.GetGateways() {
		p := part{pod, bad, "DOWN", cmp.Or(gateway.GetLastError(), gateway.GetState()), "", timeOf(gateway.GetSince())}
		switch {
		case gateway.GetUp() && gateway.GetDrained():
			p.Level, p.State, p.Cause = warning, "up, drained", "drained by an operator"
		case gateway.GetUp():
			p.Level, p.State, p.Cause = good, "up", gateway.GetWarning()
		case gateway.GetHeld():
			p.Level, p.State, p.Cause = warning, "held", "held down, because no VIP of its family is advertised"
		}
		if gateway.GetProtocol() != "static" {
			p.Via = fmt.Sprintf("%d of %d VIPs", gateway.GetExported(), gateway.GetExpected())
		}
		page.Gateways.add(gateway.GetName(), gateway.GetAddress(), p, old, status.Explanation{})
	}
}

func (page *snapshot) addLB(pod string, answered *lbv1.Status, old bool, now time.Time) {
	for _, stream := range answered.GetStreams() {
		for _, target := range stream.GetTargets() {
			state, ready := status.TargetState(target, now)
			p := part{pod, bad, state, target.GetLastError(), "", timeOf(target.GetSince())}
			if ready {
				p.Level = good
			} else if target.GetDrainCause() != "" || state == "starting" {
				p.Level = warning
			}
			page.Targets.add(stream.GetName()+" / "+target.GetName(), target.GetAddress(), p, old, status.Explanation{})
		}
	}
}

func (s *section) add(name, detail string, p part, old bool, explanation status.Explanation) {
	if s.byName == nil {
		s.byName, s.members = map[string]*object{}, map[group]map[*object]bool{}
	}
	if old {
		p.Level = unknown
	}
	key := name + "\x00" + detail
	o := s.byName[key]
	if o == nil {
		o = &object{Name: name, Detail: detail, Level: good}
		s.byName[key], s.Objects = o, append(s.Objects, o)
	}
	o.Parts, o.Level = append(o.Parts, p), min(o.Level, p.Level)
	if p.Level != good && explanation.Meaning != "" {
		equal := group{Level: p.Level, State: p.State, Cause: explanation.Meaning, Next: explanation.Next}
		if s.members[equal] == nil {
			s.members[equal] = map[*object]bool{}
		}
		s.members[equal][o] = true
	}
}

// finish counts the objects, and keeps those of the page. VIPs keep their order by address.
func (s *section) finish(query string) {
	for _, o := range s.Objects {
		// One pod is enough for traffic.
		if o.Level == bad && slices.ContainsFunc(o.Parts, func(p part) bool { return p.Level == good }) {
			o.Level = warning
		}
		s.Levels[o.Level]++
	}
	s.Objects = slices.DeleteFunc(s.Objects, func(o *object) bool { return !o.matches(strings.ToLower(query)) })
	slices.SortStableFunc(s.Objects, func(a, b *object) int { return cmp.Compare(a.Level, b.Level) })
	s.Matching = len(s.Objects)
	s.Objects = s.Objects[:min(maxObjects, len(s.Objects))]
	for g, members := range s.members {
		g.Count = len(members)
		s.Groups = append(s.Groups, g)
	}
	slices.SortFunc(s.Groups, func(a, b group) int {
		return cmp.Or(cmp.Compare(a.Level, b.Level), cmp.Compare(b.Count, a.Count), strings.Compare(a.Cause, b.Cause))
	})
}

func (o *object) matches(query string) bool {
	text := o.Name + " " + o.Detail
	for _, p := range o.Parts {
		text += " " + p.Pod + " " + p.State + " " + p.Cause + " " + p.Via
	}
	return query == "" || strings.Contains(strings.ToLower(text), query)
}

// timeOf returns the zero time for nil.
func timeOf(stamp *timestamppb.Timestamp) time.Time {
	if stamp == nil {
		return time.Time{}
	}
	return stamp.AsTime()
}
