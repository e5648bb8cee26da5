package debug

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
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

// maxRoutes bounds the routes in the document: a gateway may announce a full table.
const maxRoutes = 20_000

// neighborStates are the names of unix.NUD_* in iproute2, by bit.
var neighborStates = [...]string{"INCOMPLETE", "REACHABLE", "STALE", "DELAY", "PROBE", "FAILED", "NOARP", "PERMANENT"}

var statisticNames = [...]string{
	"rx-packets", "tx-packets", "rx-bytes", "tx-bytes", "rx-errors", "tx-errors", "rx-dropped", "tx-dropped",
}

// Document returns the document about this process and the network namespace of the calling
// thread, as indented JSON. tableID is the routing table of the gateways' routes.
func Document(version string, tableID uint32) ([]byte, error) {
	d := &document{
		Version: "v0.0.1", MeridioVersion: "vipgate " + version, UnixTime: time.Now().Unix(),
		// Meridio's tools expect lists, also empty ones, and never null.
		Environment: environment(), Interfaces: []object{}, Rules: []object{}, Routes: []object{}, Neighbors: []object{},
	}
	var kernel unix.Utsname
	var info unix.Sysinfo_t
	if err := errors.Join(unix.Uname(&kernel), unix.Sysinfo(&info)); err != nil {
		return nil, fmt.Errorf("failed to read kernel version and uptime: %w", err)
	}
	d.System = object{"cpus": runtime.NumCPU(), "cpu-info": cpus(), "host-info": object{
		"hostname": unix.ByteSliceToString(kernel.Nodename[:]), "os": runtime.GOOS,
		"kernelVersion": unix.ByteSliceToString(kernel.Release[:]),
		"kernelArch":    unix.ByteSliceToString(kernel.Machine[:]),
		"uptime":        int64(info.Uptime), "bootTime": d.UnixTime - int64(info.Uptime), "procs": info.Procs,
	}}
	conn, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := d.readLinks(conn); err != nil {
		return nil, err
	}
	for _, family := range vip.Families {
		// A kernel without IPv6 (ipv6.disable=1) has no tables of that family.
		if err := d.readFamily(conn, family, tableID); err != nil && !rtnetlink.FamilyAbsent(err) {
			return nil, err
		}
	}
	content, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("failed to encode the debug document: %w", err)
	}
	return content, nil
}

func (d *document) readLinks(conn *rtnetlink.Conn) error {
	links, err := conn.Links()
	if err != nil {
		return err
	}
	addresses, err := conn.Addresses()
	if err != nil {
		return err
	}
	for _, link := range links {
		ips, statistics := []string{}, object{}
		for i, name := range statisticNames {
			statistics[name] = link.Statistics[i]
		}
		for _, address := range addresses {
			if address.Link == link.Index {
				ips = append(ips, fmt.Sprintf("%s/%d", address.Addr, address.Network.Bits()))
			}
		}
		d.Interfaces = append(d.Interfaces, object{
			"index": link.Index, "name": link.Name, "mac": link.MAC.String(), "mtu": link.MTU,
			"up": link.Flags&unix.IFF_UP != 0, "master-index": link.Master, "ips": ips, "statistics": statistics,
		})
	}
	return nil
}

// readFamily reads the rules, the neighbor entries, and the routes of the main table, the gateway
// table and the blackhole table.
func (d *document) readFamily(conn *rtnetlink.Conn, family vip.Family, tableID uint32) error {
	rules, err := conn.Rules(family)
	if err != nil {
		return err
	}
	for _, rule := range rules {
		// The document has every key of Meridio's document, also without a value.
		d.Rules = append(d.Rules, object{
			"table": rule.Table, "priority": rule.Priority, "mark": rule.Mark, "source": text(rule.Source),
			"destination": "", "text": rule.String(),
		})
	}
	// The blackhole table follows the gateways' table.
	for _, table := range []uint32{unix.RT_TABLE_MAIN, tableID, tableID + 1} {
		routes, err := conn.Routes(family, rtnetlink.RouteFilter{Table: table})
		if err != nil {
			return err
		}
		// The limit applies to all tables and families together.
		for _, route := range routes[:min(len(routes), max(0, maxRoutes-len(d.Routes)))] {
			d.Routes = append(d.Routes, object{
				"table": route.Table, "interface-index": route.Link, "destination": route.Prefix.String(),
				"gateway": text(route.NextHop), "nexthops": []string{}, "source": "", "text": route.String(),
			})
		}
	}
	neighbors, err := conn.Neighbors(family)
	if err != nil {
		return err
	}
	for _, neighbor := range neighbors {
		// The kernel sets one bit, or none for NUD_NONE.
		state := ""
		if bit := bits.TrailingZeros(uint(neighbor.State)); bit < len(neighborStates) {
			state = neighborStates[bit]
		}
		d.Neighbors = append(d.Neighbors, object{
			"ip": neighbor.Addr.String(), "mac": neighbor.MAC.String(), "state": state, "interface-index": neighbor.Link,
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
	lines := bufio.NewScanner(io.LimitReader(file, maxCPUInfo))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if name == "processor" {
			list = append(list, object{"cpu": len(list)})
		}
		if len(list) == 0 {
			continue
		}
		switch processor := list[len(list)-1]; name {
		case "vendor_id":
			processor["vendorId"] = value
		case "model name":
			processor["modelName"] = value
		case "cpu MHz":
			processor["mhz"], _ = strconv.ParseFloat(value, 64) // 0 if the value is not a number
		}
	}
	return list
}

// text formats a value, or returns "" for the zero value.
func text(value interface {
	IsValid() bool
	String() string
},
) string {
	if !value.IsValid() {
		return ""
	}
	return value.String()
}

// environment returns the variables that configure a frontend. Other variables may hold secrets.
func environment() []string {
	prefixes := []string{"VIPGATE_", "NFE_", "MERIDIO_", "SPIFFE_ENDPOINT_SOCKET="}
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return !slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(variable, prefix) })
	})
}
