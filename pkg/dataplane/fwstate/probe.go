package fwstate

import (
	"fmt"
	"slices"

	"github.com/google/nftables/expr"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
)

// probeTable is added and deleted in one transaction, so it is never visible to other processes.
var probeTable = nft.Table{Family: inet.Family, Name: plan.TableName + "-probe"}

// kernelFeature is an nftables expression, its module, and the consequence of its absence.
type kernelFeature struct {
	module, what string
	expression   expr.Any
}

func (conn *Conn) missing(parts ...kernelFeature) []plan.Problem {
	var problems []plan.Problem
	for _, feature := range parts {
		if err := conn.probeExpression(feature.expression); err != nil {
			problems = append(problems, plan.Problem{
				Object: feature.module, Detail: fmt.Sprintf("%s: %v", feature.what, err), Remedy: "modprobe " + feature.module,
			})
		}
	}
	return problems
}

// MissingModules probes the kernel for the features that the data plane requires.
func (conn *Conn) MissingModules() []plan.Problem {
	table := kernelFeature{"nf_tables", "nftables of the family inet do not work", nil}
	// Without nftables every other probe fails, too: report only the cause.
	if problems := conn.missing(table); problems != nil {
		return problems
	}
	key := Register(0)
	problems := conn.missing(
		kernelFeature{"nft_hash", "the kernel cannot hash flows", &expr.Hash{
			SourceRegister: key, DestRegister: key, Length: 4, Modulus: 2, Seed: 1, Type: expr.HashTypeJenkins,
		}},
		// Required even with Conntrack off: connection tracking reassembles fragments.
		kernelFeature{"nft_ct", "the kernel cannot ask connection tracking", &expr.Ct{Key: expr.CtKeyMARK, Register: key}},
	)
	if conn.config.Conntrack == ConntrackLoose {
		problems = append(problems, conn.missingDynamicMaps()...)
	}
	for _, family := range conn.families {
		rules, err := conn.rt.Rules(family)
		if err != nil {
			problems = append(problems, plan.Problem{
				Object: "policy routing", Detail: fmt.Sprintf("the kernel cannot select a routing table by fwmark: %v", err),
				Remedy: "run a kernel with CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES",
			})
		}
		if slices.ContainsFunc(rules, conn.conflicts) {
			problems = append(problems, plan.Problem{
				Object: fmt.Sprintf("%s policy rules of priority %d and %d", family, conn.config.Priority, conn.config.Priority+1),
				Detail: "rules of another process have them; packets without a fwmark of a target would skip these",
				Remedy: "choose three unused priorities in a row, the first with --dataplane-priority; see ip rule show",
			})
		}
	}
	return problems
}

// missingDynamicMaps probes the kernel for maps that the packet path updates.
func (conn *Conn) missingDynamicMaps() []plan.Problem {
	flows := nft.Set{
		Name: "flows", Flags: flowFlags, KeyType: nft.TypeMark, KeyLen: 4, DataType: nft.TypeMark, DataLen: 4, Size: 1,
	}
	err := conn.probeExpression(&expr.Dynset{
		SrcRegKey: Register(0), SrcRegData: Register(0), SetName: flows.Name, Operation: dynsetDelete,
	}, flows)
	if err == nil {
		return nil
	}
	return []plan.Problem{{
		Object: "maps of the packet path", Detail: fmt.Sprintf("the kernel cannot remember flows: %v", err),
		Remedy: "run Linux 5.4 or later, or lb run --conntrack=on",
	}}
}

// UseTimeouts makes rules assign checkTimeouts if the kernel has CONFIG_NF_CONNTRACK_TIMEOUT.
func (conn *Conn) UseTimeouts() error {
	config, transaction := conn.config, &nft.Transaction{Table: probeTable}
	config.timeouts = len(checkTimeouts)
	transaction.AddTable()
	transaction.AddTimeouts(checkTimeouts...)
	transaction.AddChain(nft.Chain{Name: "probe"})
	transaction.AddRules("probe", config.baseRules(checksChain)...)
	transaction.DeleteTable()
	err := conn.commit(transaction)
	if err == nil {
		conn.config = config
	}
	return err
}

// probeExpression adds and deletes a table with one rule and its sets in the same transaction.
func (conn *Conn) probeExpression(expression expr.Any, sets ...nft.Set) error {
	transaction := &nft.Transaction{Table: probeTable}
	transaction.AddTable()
	for _, set := range sets {
		transaction.AddSet(set)
	}
	transaction.AddChain(nft.Chain{Name: "probe"})
	if expression != nil {
		transaction.AddRules("probe", newRule("", &expr.Meta{Key: expr.MetaKeyMARK, Register: Register(0)}, expression))
	}
	transaction.DeleteTable()
	return conn.commit(transaction)
}
