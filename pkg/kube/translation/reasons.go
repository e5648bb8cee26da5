package translation

// Reasons of a Trench.
const (
	// ReasonValid: there is a trench file.
	ReasonValid = "Valid"
	// ReasonNotFound: there is no Trench. The previous file stays in force.
	ReasonNotFound = "NotFound"
	// ReasonInvalid: the Trench makes no trench file. The previous one stays in force. Of a Service:
	// the reader of the trench file refuses its stream.
	ReasonInvalid = "Invalid"
	// ReasonPasswordMissing, of a Secret: it, or its key, does not exist. The gateway has no session.
	ReasonPasswordMissing = "PasswordMissing"
	// ReasonAddressNotPublished: an address of spec.publish is none. The others are published.
	ReasonAddressNotPublished = "AddressNotPublished"
)

// Reasons of Services.
const (
	// ReasonAccepted: the Service is a stream.
	ReasonAccepted = "Accepted"
	// ReasonUnknownAnnotation: an annotation vipgate.io/* is not one of a Service. A warning.
	ReasonUnknownAnnotation = "UnknownAnnotation"
	// ReasonInvalidAnnotation: an annotation has a value that the reader of the trench file refuses.
	ReasonInvalidAnnotation = "InvalidAnnotation"
	// ReasonNoVIPs: the annotation vipgate.io/vips is missing or empty.
	ReasonNoVIPs = "NoVIPs"
	// ReasonVIPNotAllowed: a VIP is not one of the Trench.
	ReasonVIPNotAllowed = "VIPNotAllowed"
	// ReasonVIPHeld: a Service that had the VIP before, or is older, has it; or a stream of the Trench.
	ReasonVIPHeld = "VIPHeld"
	// ReasonSessionAffinity: spec.sessionAffinity is set. A warning.
	ReasonSessionAffinity = "SessionAffinity"
	// ReasonPortTranslation: a targetPort is not the port. Of a Pod or EndpointSlice: it has another
	// number for it, and is left out.
	ReasonPortTranslation = "PortTranslation"
	// ReasonNoCheck: there is neither a check nor a TCP port to check.
	ReasonNoCheck = "NoCheck"
)

// Reasons of what is left out of a Service that is accepted.
const (
	// ReasonNoPods: no Pod has the labels of the selector and of the trench.
	ReasonNoPods = "NoPods"
	// ReasonNetworkStatusMissing, of a Pod: it has no annotation of Multus, or one that is not valid.
	ReasonNetworkStatusMissing = "NetworkStatusMissing"
	// ReasonNetworkMissing, of a Pod: it has no address of the Trench's network.
	ReasonNetworkMissing = "NetworkMissing"
	// ReasonAddressRefused, of a Pod or EndpointSlice: an address is not one of a host, outside the
	// subnets, or in a VIP.
	ReasonAddressRefused = "AddressRefused"
	// ReasonAddressTaken, of a Pod or EndpointSlice: an older Pod, or another endpoint, has the address.
	ReasonAddressTaken = "AddressTaken"
	// ReasonNotChecked, of a Pod or EndpointSlice: an endpoint has no address of the families that are
	// checked.
	ReasonNotChecked = "NotChecked"
	// ReasonNoAddressOfFamily: there are endpoints, but none has an address of a VIP's family.
	ReasonNoAddressOfFamily = "NoAddressOfFamily"
	// ReasonSourceRanges: spec.loadBalancerSourceRanges has no effect. A warning.
	ReasonSourceRanges = "SourceRangesIgnored"
	// ReasonMore: there are more problems than those that are listed.
	ReasonMore = "MoreProblems"
)
