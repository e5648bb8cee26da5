package status

import (
	"fmt"
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
)

// View selects the rendered parts of a status. The zero View has all but instances and revisions.
type View struct {
	// Problems leaves out everything that is good, and renders equal rows of a table as one.
	Problems bool
	// Wide adds instances and revisions.
	Wide bool
}

// Frontend renders the status of a frontend in the usual view; see [View.Frontend].
func Frontend(status *frontendv1.Status, now time.Time) (text string, complete bool) {
	return View{}.Frontend(status, now)
}

// LB renders the status of a load balancer in the usual view.
func LB(status *lbv1.Status, now time.Time) string { return View{}.LB(status, now) }

// Kube renders the status of kube in the usual view; see [View.Kube].
func Kube(status *kubev1.Status, now time.Time) (text string, good bool) {
	return View{}.Kube(status, now)
}

// Target renders the status of a target in the usual view; see [View.Target].
func Target(status *targetadminv1.Status, now time.Time) (text string, good bool) {
	return View{}.Target(status, now)
}

// Targets renders a list of targets in the usual view.
func Targets(all []*targetv1.TargetInfo, now time.Time) string { return View{}.Targets(all, now) }

// only returns the elements of a table: in a view of problems, the bad ones.
func only[E any](view View, all []E, isBad func(E) bool) []E {
	if !view.Problems {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(element E) bool { return !isBad(element) })
}

// writeTable appends a table. In a view of problems, rows that differ only in the name and the time
// are one row, which counts them as things.
func (view View) writeTable(out *strings.Builder, rows *table, name, since int, things string) {
	if view.Problems {
		rows.group(name, since, things)
	}
	rows.write(out)
}

// group merges the rows that differ only in two columns.
func (rows *table) group(name, since int, things string) {
	merged, at, counts := [][]string{rows.rows[0]}, map[string]int{}, map[int][]string{}
	for _, row := range rows.rows[1:] {
		key := slices.Clone(row)
		key[name], key[since] = "", ""
		index, known := at[strings.Join(key, "\x00")]
		if !known {
			index = len(merged)
			at[strings.Join(key, "\x00")] = index
			merged = append(merged, slices.Clone(row))
		}
		counts[index] = append(counts[index], row[name])
	}
	for index, all := range counts {
		if len(all) > 1 {
			merged[index][name] = fmt.Sprintf("%d %s: %s", len(all), things, names(all))
		}
	}
	rows.rows = merged
}

// SelectFrontend leaves only the VIPs in a status, and returns an error for a VIP that it has not.
func SelectFrontend(status *frontendv1.Status, vips []string) error {
	chosen := newSelection(vips)
	status.Exports = slices.DeleteFunc(status.Exports, func(export *frontendv1.Export) bool {
		export.Vips = slices.DeleteFunc(export.Vips, func(vip string) bool { return !chosen.has(vip) })
		return len(export.Vips) == 0
	})
	// The selection above does not count: BIRD may still export a VIP that left the configuration.
	chosen = newSelection(vips)
	status.Vips = slices.DeleteFunc(status.Vips, func(v *frontendv1.VipStatus) bool { return !chosen.has(v.GetVip()) })
	return chosen.missing()
}

// SelectLB leaves the VIPs and their streams in a status, and returns an error for a missing VIP.
func SelectLB(status *lbv1.Status, vips []string) error {
	chosen := newSelection(vips)
	status.Vips = slices.DeleteFunc(status.Vips, func(v *lbv1.VipStatus) bool { return !chosen.has(v.GetVip()) })
	streams := map[string]bool{}
	status.Streams = slices.DeleteFunc(status.Streams, func(stream *lbv1.StreamStatus) bool {
		streams[stream.GetName()] = slices.ContainsFunc(stream.GetVips(), chosen.has)
		return !streams[stream.GetName()]
	})
	if plane := status.GetDataPlane(); plane != nil {
		plane.Streams = slices.DeleteFunc(plane.Streams, func(stream *lbv1.DataPlaneStream) bool {
			return !streams[stream.GetName()]
		})
	}
	return chosen.missing()
}

// SelectKube leaves the Services with the VIPs in a status, or returns an error for an absent VIP.
func SelectKube(status *kubev1.Status, vips []string) error {
	chosen := newSelection(vips)
	status.Services = slices.DeleteFunc(status.Services, func(service *kubev1.ServiceVerdict) bool {
		return !slices.ContainsFunc(service.GetVips(), chosen.has)
	})
	return chosen.missing()
}

// selection maps each VIP to whether a status has it.
type selection map[string]bool

func newSelection(vips []string) selection {
	chosen := selection{}
	for _, vip := range vips {
		chosen[vip] = false
	}
	return chosen
}

func (chosen selection) has(vip string) bool {
	_, is := chosen[vip]
	if is {
		chosen[vip] = true
	}
	return is
}

func (chosen selection) missing() error {
	for vip, found := range chosen {
		if !found {
			return fmt.Errorf("VIP %s is not configured here; `explain %[1]s` has the remedy", vip)
		}
	}
	return nil
}
