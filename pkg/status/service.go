package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
)

// KubeSteps adds the steps by which a Service gets into the trench file, and returns its VIPs.
func (chain *Chain) KubeSteps(status *kubev1.Status, now time.Time) (vips []string) {
	trench := status.GetVerdict()
	kind, _, _ := strings.Cut(trench.GetObject(), " ")
	kind = cmp.Or(kind, "Trench")
	switch {
	case status.GetStaleSince() != nil:
		chain.add("API server", false, "not followed for "+ago(status.GetStaleSince(), now)+": "+status.GetStaleCause(),
			"`kube status`: what is watched; the service account's RBAC, the network to "+status.GetApiServer())
	case status.GetSyncedSince() == nil:
		chain.add("API server", false, "not every kind of object was listed yet", "`kube status`: what is watched")
	default:
		chain.add("API server", true, "followed for "+ago(status.GetSyncedSince(), now), "")
	}
	if trench == nil {
		return nil
	}
	chain.verdict(kind, trench, "correct the "+kind+": `kubectl describe "+strings.ToLower(kind)+" -n "+
		status.GetNamespace()+" "+status.GetTrench()+"`")
	// A refused Trench has no Services.
	if !trench.GetAccepted() {
		return nil
	}
	namespace, name, _ := strings.Cut(strings.TrimPrefix(chain.Service, "svc/"), "/")
	at := slices.IndexFunc(status.GetServices(), func(service *kubev1.ServiceVerdict) bool {
		_, object, _ := strings.Cut(service.GetVerdict().GetObject(), " ")
		return object == namespace+"/"+name
	})
	if at < 0 {
		chain.add("Service", false, "the "+kind+" has no such Service",
			fmt.Sprintf("`kubectl get service -n %s %s -o yaml`: "+
				"type LoadBalancer, loadBalancerClass vipgate.io/%s, and its namespace in spec.namespaces of the %s", namespace,
				name, status.GetTrench(), kind))
		return nil
	}
	service := status.GetServices()[at]
	chain.verdict("Service", service.GetVerdict(),
		"correct the Service: `kubectl describe service -n "+namespace+" "+name+"`")
	if !service.GetVerdict().GetAccepted() {
		return nil
	}
	chain.add("targets", service.GetTargets() > 0, plural(int(service.GetTargets()), "target"),
		fmt.Sprintf("`kubectl describe service -n %s %s`: does its selector match Pods with an address, or without a "+
			"selector, has it EndpointSlices?", namespace, name))
	file := status.GetFile()
	chain.add("trench file", file.GetError() == "" && file.GetPath() != "",
		cmp.Or(file.GetError(), "stream "+service.GetStream()+" is in "+file.GetPath()),
		"the volume that the containers share")
	if kind == "Trench" {
		chain.add("leader", status.GetLeader() != "", cmp.Or(status.GetLeader(), "no pod writes status and Events"),
			"`kubectl get lease -n "+status.GetNamespace()+" vipgate-"+status.GetTrench()+"`; the log of kube")
	}
	return service.GetVips()
}

// verdict adds whether an object is accepted, and its refused parts.
func (chain *Chain) verdict(name string, verdict *kubev1.Verdict, next string) {
	text := "accepted"
	if !verdict.GetAccepted() {
		text = verdict.GetReason() + ": " + verdict.GetMessage()
	}
	chain.add(name, verdict.GetAccepted(), text, next)
	for _, problem := range verdict.GetProblems() {
		text := problem.GetObject() + ": " + problem.GetReason() + ": " + problem.GetMessage()
		if problem.GetWarning() {
			chain.note(name, text, next)
		} else {
			chain.add(name, false, text, next)
		}
	}
}
