package translation

// Reasons of a Trench.
const (
	// ReasonValid: the trench file is valid.
	ReasonValid = "Valid"
	// ReasonNotFound: the Trench does not exist. The previous file stays in force.
	ReasonNotFound = "NotFound"
	// ReasonInvalid, of a Trench: its translation is not a valid trench file. The previous file stays
	// in force. Of a Service: the reader of the trench file refuses its stream.
	ReasonInvalid = "Invalid"
	// ReasonPasswordMissing, of a Secret: it, or its key, does not exist. Pods keep the last password.
	ReasonPasswordMissing = "PasswordMissing"
	// ReasonUnreadable: the API server refuses a namespace or Secret, which is as last read, or empty.
	ReasonUnreadable = "Unreadable"
	// ReasonSubnetsMissing: the targets of other namespaces than the Trench's are refused, because
	// nothing bounds their addresses.
	ReasonSubnetsMissing = "SubnetsMissing"
	// ReasonAddressNotPublished: an address of spec.publish is invalid. The valid ones are published.
	ReasonAddressNotPublished = "AddressNotPublished"
)

// Reasons of Services.
const (
	// ReasonAccepted: the Service is a stream.
	ReasonAccepted = "Accepted"
	// ReasonUnknownAnnotation: an annotation vipgate.io/* is not defined for Services. A warning.
	ReasonUnknownAnnotation = "UnknownAnnotation"
	// ReasonInvalidAnnotation: an annotation has a value that the reader of the trench file refuses.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonNoVIPs: the annotation vipgate.io/vips is missing or empty.
	ReasonNoVIPs = "NoVIPs"
	// ReasonVIPNotAllowed: the Trench does not have the VIP.
	ReasonVIPNotAllowed = "VIPNotAllowed"
	// ReasonVIPHeld: the VIP belongs to an earlier or older Service, or to a stream of the Trench.
	ReasonVIPHeld = "VIPHeld"
	// ReasonQuotaExceeded: the Services of the namespace have more than spec.quota permits, or the
	// trench file is too large with them.
	ReasonQuotaExceeded = "QuotaExceeded"
	// ReasonSessionAffinity: spec.sessionAffinity is set. A warning.
	ReasonSessionAffinity = "SessionAffinity"
	// ReasonPortTranslation: targetPort differs from port. A Pod or EndpointSlice that has a
	// different number for the port is left out.
	ReasonPortTranslation = "PortTranslation"
	// ReasonNoCheck: the Service has neither a check nor a TCP port to check.
	ReasonNoCheck = "NoCheck"
)

// Reasons of problems of an accepted Service.
const (
	// ReasonNoPods: no Pod has the labels of the selector and of the trench.
	ReasonNoPods = "NoPods"
	// ReasonNetworkStatusMissing, of a Pod: the annotation of Multus is missing or invalid.
	ReasonNetworkStatusMissing = "NetworkStatusMissing"
	// ReasonNetworkMissing, of a Pod: it has no address of the Trench's network.
	ReasonNetworkMissing = "NetworkMissing"
	// ReasonAddressRefused, of a Pod or EndpointSlice: an address is not a host address, is outside
	// the subnets, is link-local or a gateway's, or is in a VIP.
	ReasonAddressRefused = "AddressRefused"
	// ReasonAddressTaken, of a Pod or EndpointSlice: another one of the namespace has it.
	ReasonAddressTaken = "AddressTaken"
	// ReasonAddressShared, of a Pod: a Pod of another namespace has the address, too. A warning.
	ReasonAddressShared = "AddressShared"
	// ReasonNotChecked, of a Pod or EndpointSlice: an endpoint lacks an address of a checked family.
	ReasonNotChecked = "NotChecked"
	// ReasonNoAddressOfFamily: the Service has endpoints, but none with an address of a VIP's family.
	ReasonNoAddressOfFamily = "NoAddressOfFamily"
	// ReasonTCPCheck: only a TCP connection is checked, and the Pods have a better probe. A warning.
	ReasonTCPCheck = "TCPCheck"
	// ReasonSourceRanges: spec.loadBalancerSourceRanges has no effect. A warning.
	ReasonSourceRanges = "SourceRangesIgnored"
	// ReasonMore: the list of problems is truncated.
	ReasonMore = "MoreProblems"
)
