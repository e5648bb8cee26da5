package v1alpha1

import "k8s.io/apimachinery/pkg/runtime/schema"

// ReportResource is the resource of TrenchReports, in which each trench pod reports the VIPs that
// it advertises. A TrenchReport has the name of the Pod that owns it.
var ReportResource = schema.GroupVersionResource{Group: Group, Version: "v1alpha1", Resource: "trenchreports"}

// ReportKind is the kind of a TrenchReport.
var ReportKind = schema.GroupVersionKind{Group: Group, Version: "v1alpha1", Kind: "TrenchReport"}

// TargetsReady is the condition type, prefixed with the group, that is false while a target of the
// Service fails its checks.
const TargetsReady = "TargetsReady"

// LastAccepted is the condition type, prefixed with the group, whose message records the last
// accepted form of the Service. It stays in force while the Service is refused.
const LastAccepted = "LastAccepted"

// Generations is the condition type, prefixed with the group, whose message records the sets of
// targets that the Service had, for flows that gateways move to a new trench pod.
const Generations = "Generations"
