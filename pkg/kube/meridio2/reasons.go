package meridio2

// Reasons of a Gateway.
const (
	// ReasonValid: the trench file is written.
	ReasonValid = "Valid"
	// ReasonNotFound: there is no Gateway. The previous file stays in force.
	ReasonNotFound = "NotFound"
	// ReasonDeleting: the Gateway is being deleted. The previous file stays in force until the pod
	// ends.
	ReasonDeleting = "Deleting"
	// ReasonInvalid: the Gateway makes no trench file. The previous one stays in force. Of a
	// GatewayRouter: the reader of the trench file refuses it.
	ReasonInvalid = "Invalid"
)

// Reasons of GatewayRouters.
const (
	// ReasonAccepted: the GatewayRouter is a gateway of the trench file.
	ReasonAccepted = "Accepted"
	// ReasonNameTooLong: the name has more characters than that of a gateway may have.
	ReasonNameTooLong = "NameTooLong"
	// ReasonInvalidAddress: spec.address is none of a router. Of a Gateway: an address in its status is
	// no VIP, and is left out.
	ReasonInvalidAddress = "InvalidAddress"
	// ReasonInvalidASN: an AS number is reserved.
	ReasonInvalidASN = "InvalidASN"
	// ReasonAddressTaken: an older GatewayRouter has the address.
	ReasonAddressTaken = "AddressTaken"
	// ReasonInterfaceDiffers: an older GatewayRouter has another interface.
	ReasonInterfaceDiffers = "InterfaceDiffers"
)
