package dataplane

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
)

// Preflight returns what the network namespace of the calling thread lacks, each with the
// command that fixes it. It changes nothing.
func Preflight(o Options) []Problem {
	o = o.withDefaults()
	if problem := lacksCapability(); problem != nil {
		return []Problem{*problem} // every other check needs it
	}
	f, err := fwstate.Dial(o.config())
	if err != nil {
		return []Problem{{Object: "netlink", Detail: err.Error(), Remedy: "run it on a Linux kernel with netlink sockets"}}
	}
	problems := f.MissingModules()
	for _, p := range sysctlProblems(f) {
		problems = append(problems, p.Problem)
	}
	if err := f.Close(); err != nil {
		problems = append(problems, Problem{Object: "netlink", Detail: err.Error()})
	}
	return problems
}

func lacksCapability() *Problem {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &data[0]); err != nil {
		return &Problem{Object: "CAP_NET_ADMIN", Detail: fmt.Sprintf("the capabilities of this process cannot be read: %v", err)}
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0 {
		return nil
	}
	return &Problem{
		Object: "CAP_NET_ADMIN", Detail: "this process may not change nftables and routing",
		Remedy: `add NET_ADMIN to the container: securityContext: {capabilities: {add: ["NET_ADMIN"]}}`,
	}
}
