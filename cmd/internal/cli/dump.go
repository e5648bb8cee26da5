package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxElements is the number of elements that are printed of a set: a Maglev table has 65 537, and
// the reader shares the memory limit of the container.
const maxElements = 1_000

// DumpCommand prints the configuration in force and the state of the kernel that vipgate uses, for
// sysdump: images have neither nft nor ip. It needs no running process.
type DumpCommand struct{ AdminFlags }

// Run prints the sections. An error of one does not prevent the others.
func (c DumpCommand) Run(ctx context.Context, out *Output) error {
	return errors.Join(c.configuration(ctx, out), dumpNetwork(out), dumpNFTables(out))
}

func (c DumpCommand) configuration(ctx context.Context, out *Output) error {
	out.Printf("# Configuration in force\n")
	answer, err := Call(ctx, "dump", c.AdminFlags, adminv1.NewConfigurationServiceClient,
		adminv1.ConfigurationServiceClient.GetConfiguration, &adminv1.GetConfigurationRequest{})
	switch {
	case grpcstatus.Code(err) == codes.Unimplemented:
		return nil
	case err != nil:
		return fmt.Errorf("configuration in force: %w", Explain(err))
	}
	out.Printf("%s", answer.GetTrenchFile())
	return nil
}

// dumpNetwork prints interfaces, addresses, rules, routes and neighbors.
func dumpNetwork(out *Output) error {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	links, err := conn.Links()
	names := map[int]string{0: "-"}
	out.Printf("\n# Interfaces\n")
	for _, link := range links {
		names[link.Index] = link.Name
		out.Printf("%d %s up=%v mtu %d master %d mac %s statistics %v\n", link.Index, link.Name, link.Up(), link.MTU,
			link.Master, link.MAC, link.Statistics)
	}
	addresses, failed := conn.Addresses()
	err = errors.Join(err, failed)
	out.Printf("\n# Addresses\n")
	for _, address := range addresses {
		out.Printf("%s dev %s network %s flags %#x\n", address.Addr, names[address.Link], address.Network, address.Flags)
	}
	out.Printf("\n# Rules, routes and neighbors\n")
	for _, family := range []vip.Family{vip.IPv4, vip.IPv6} {
		rules, failed := conn.Rules(family)
		err = errors.Join(err, failed)
		for _, rule := range rules {
			out.Printf("%s\n", rule)
		}
		routes, failed := conn.Routes(family, rtnetlink.RouteFilter{})
		err = errors.Join(err, failed)
		for _, route := range routes {
			out.Printf("%s dev %s type %d dead=%v multipath=%v\n", route, names[route.Link], route.Type, route.Dead,
				route.Multipath)
		}
		neighbors, failed := conn.Neighbors(family)
		err = errors.Join(err, failed)
		for _, neighbor := range neighbors {
			out.Printf("neighbor %s dev %s mac %s state %#x\n", neighbor.Addr, names[neighbor.Link], neighbor.MAC,
				neighbor.State)
		}
	}
	return err
}

// dumpNFTables prints all tables. Rules are printed as the expressions of the kernel, which is the
// form of `nft --debug=netlink list ruleset`.
func dumpNFTables(out *Output) error {
	out.Printf("\n# nftables\n")
	reader, err := nftables.New()
	if err != nil {
		return fmt.Errorf("failed to open nftables: %w", err)
	}
	conn, err := nft.Dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	tables, err := reader.ListTables()
	if err != nil {
		return fmt.Errorf("failed to list nftables tables: %w", err)
	}
	chains, err := reader.ListChains()
	for _, table := range tables {
		own := nft.Table{Family: byte(table.Family), Name: table.Name}
		out.Printf("table %s flags %#x\n", own, table.Flags)
		sets, failed := reader.GetSets(table)
		err = errors.Join(err, failed)
		for _, set := range sets {
			err = errors.Join(err, dumpSet(out, conn, own, set))
		}
		for _, chain := range chains {
			if chain.Table.Name != table.Name || chain.Table.Family != table.Family {
				continue
			}
			out.Printf("  chain %s", chain.Name)
			if chain.Hooknum != nil && chain.Priority != nil {
				out.Printf(" type %s hook %d priority %d", chain.Type, *chain.Hooknum, *chain.Priority)
			}
			if chain.Policy != nil {
				out.Printf(" policy %d", *chain.Policy)
			}
			out.Printf("\n")
			rules, failed := reader.GetRules(table, chain)
			err = errors.Join(err, failed)
			for _, rule := range rules {
				out.Printf("    rule %d comment %q\n", rule.Handle, rule.UserData)
				for _, expression := range rule.Exprs {
					out.Printf("      %T %+v\n", expression, expression)
				}
			}
		}
	}
	return err
}

// dumpSet prints a set, and the first of its elements.
func dumpSet(out *Output, conn *nft.Conn, table nft.Table, set *nftables.Set) error {
	out.Printf("  set %s key %s data %s map=%v interval=%v\n", set.Name, set.KeyType.Name, set.DataType.Name, set.IsMap,
		set.Interval)
	count := 0
	_, err := conn.Elements(table, set.Name, func(element nft.Element) {
		if count++; count <= maxElements {
			out.Printf("    key %x data %x chain %q end=%v\n", element.Key, element.Data, element.Chain, element.End)
		}
	})
	out.Printf("    %d elements\n", count)
	return err
}
