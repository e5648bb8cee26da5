// Package debug writes the document of Meridio's `frontend --debug`.
package debug

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// document has the keys of Meridio's `--debug` document, so that Meridio's tools can read it.
type document struct {
	Version        string   `json:"version"` // of the document
	MeridioVersion string   `json:"meridio-version"`
	UnixTime       int64    `json:"unix-time"`
	Interfaces     []object `json:"network-interfaces"`
	Rules          []object `json:"rules"`
	Routes         []object `json:"route"`
	Neighbors      []object `json:"neighbors"`
	System         object   `json:"system"`
	Environment    []string `json:"environment-variables"`
}

// object is a JSON object. The key "text", which Meridio lacks, holds the complete textual form.
type object map[string]any

// maxDebugRoutes bounds the routes in the document: a gateway may announce a full table.
const maxDebugRoutes = 20_000

// neighborStates are the names of unix.NUD_* in iproute2, by bit.
var neighborStates = [...]string{"INCOMPLETE", "REACHABLE", "STALE", "DELAY", "PROBE", "FAILED", "NOARP", "PERMANENT"}

var statisticNames = [...]string{
	"rx-packets", "tx-packets", "rx-bytes", "tx-bytes", "rx-errors", "tx-errors", "rx-dropped", "tx-dropped",
}

// Document returns the document about this process and the network namespace of the calling thread,
// as indented JSON. tableID is the routing table of the gateways' routes.
func Document(version string, tableID uint32) ([]byte, error) {
	d := &document{
		Version: "v0.0.1", MeridioVersion: "vipgate " + version, UnixTime: time.Now().Unix(),
		Environment: environment(), Interfaces: []object{}, Rules: []object{}, Routes: []object{}, Neighbors: []object{},
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, fmt.Errorf("failed to read the kernel version: %w", err)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return nil, fmt.Errorf("failed to read the uptime: %w", err)
	}
	d.System = object{"cpus": runtime.NumCPU(), "cpu-info": cpus(), "host-info": object{
		"hostname": unix.ByteSliceToString(u.Nodename[:]), "os": runtime.GOOS,
		"kernelVersion": unix.ByteSliceToString(u.Release[:]), "kernelArch": unix.ByteSliceToString(u.Machine[:]),
		"uptime": int64(info.Uptime), "bootTime": d.UnixTime - int64(info.Uptime), "procs": info.Procs,
	}}
	c, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := d.readLinks(c); err != nil {
		return nil, err
	}
	for _, f := range vip.Families {
		if err := d.readFamily(c, f, tableID); err != nil && !rtnetlink.FamilyAbsent(err) {
			return nil, err
		}
	}
	content, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("failed to encode the debug document: %w", err)
	}
	return content, nil
}

func (d *document) readLinks(c *rtnetlink.Conn) error {
	links, err := c.Links()
	if err != nil {
		return err
	}
	addrs, err := c.Addresses()
	if err != nil {
		return err
	}
	for _, l := range links {
		ips, statistics := []string{}, object{}
		for k, name := range statisticNames {
			statistics[name] = l.Statistics[k]
		}
		for _, a := range addrs {
			if a.Link == l.Index {
				ips = append(ips, fmt.Sprintf("%s/%d", a.Addr, a.Network.Bits()))
			}
		}
		d.Interfaces = append(d.Interfaces, object{
			"index": l.Index, "name": l.Name, "mac": l.MAC.String(), "mtu": l.MTU, "up": l.Flags&unix.IFF_UP != 0,
			"master-index": l.Master, "ips": ips, "statistics": statistics,
		})
	}
	return nil
}

// readFamily reads the rules, the neighbor entries, and the routes of the main table, the gateway
// table and the blackhole table.
func (d *document) readFamily(c *rtnetlink.Conn, f vip.Family, tableID uint32) error {
	rules, err := c.Rules(f)
	if err != nil {
		return err
	}
	for _, r := range rules {
		d.Rules = append(d.Rules, object{
			"table": r.Table, "priority": r.Priority, "mark": r.Mark, "source": text(r.Source), "destination": "",
			"text": r.String(),
		})
	}
	for _, table := range []uint32{unix.RT_TABLE_MAIN, tableID, tableID + 1} {
		routes, err := c.Routes(f, rtnetlink.RouteFilter{Table: table})
		if err != nil {
			return err
		}
		for _, r := range routes[:min(len(routes), max(0, maxDebugRoutes-len(d.Routes)))] {
			d.Routes = append(d.Routes, object{
				"table": r.Table, "interface-index": r.Link, "destination": r.Prefix.String(),
				"gateway": text(r.NextHop), "nexthops": []string{}, "source": "", "text": r.String(),
			})
		}
	}
	neighbors, err := c.Neighbors(f)
	if err != nil {
		return err
	}
	for _, n := range neighbors {
		state := ""
		for bit, name := range neighborStates {
			if n.State&(1<<bit) != 0 {
				state = name
			}
		}
		d.Neighbors = append(d.Neighbors, object{
			"ip": n.Addr.String(), "mac": n.MAC.String(), "state": state, "interface-index": n.Link,
		})
	}
	return nil
}

// maxCPUInfo bounds the bytes read from /proc/cpuinfo, which has about 1 KiB for each processor.
const maxCPUInfo = 1 << 20

// cpus returns vendor, model and clock of each processor in /proc/cpuinfo, as far as it is
// readable. The keys have the names of Meridio's document.
func cpus() []object {
	list := []object{}
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return list
	}
	defer file.Close()
	names := map[string]string{"vendor_id": "vendorId", "model name": "modelName", "cpu MHz": "mhz"}
	lines := bufio.NewScanner(io.LimitReader(file, maxCPUInfo))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if name == "processor" {
			list = append(list, object{"cpu": len(list)})
		}
		if key := names[name]; key == "mhz" && len(list) > 0 {
			list[len(list)-1][key], _ = strconv.ParseFloat(value, 64) // 0 if the value is not a number
		} else if key != "" && len(list) > 0 {
			list[len(list)-1][key] = value
		}
	}
	return list
}

// text formats a value, or returns "" for the zero value.
func text(v interface {
	IsValid() bool
	String() string
},
) string {
	if !v.IsValid() {
		return ""
	}
	return v.String()
}

// environment returns the variables that configure a frontend. Other variables may hold secrets.
func environment() []string {
	prefixes := []string{"VIPGATE_", "NFE_", "MERIDIO_", "SPIFFE_ENDPOINT_SOCKET="}
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		return !slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(v, prefix) })
	})
}
