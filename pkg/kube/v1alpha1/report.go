package v1alpha1

import "k8s.io/apimachinery/pkg/runtime/schema"

// ReportResource is the resource of TrenchReports, in which each trench pod reports what it
// advertises: one object of the name of the Pod, which owns it.
var ReportResource = schema.GroupVersionResource{Group: Group, Version: "v1alpha1", Resource: "trenchreports"}

// ReportKind is the kind of a TrenchReport.
var ReportKind = schema.GroupVersionKind{Group: Group, Version: "v1alpha1", Kind: "TrenchReport"}

// TargetsReady is the type of the condition of a Service, with the prefix of the group, that is
// false while a target fails its checks.
const TargetsReady = "TargetsReady"

// LastAccepted is the type of the condition of a Service, with the prefix of the group, whose
// message is the Service as it was accepted last: what is served while it is refused.
const LastAccepted = "LastAccepted"
