package meridio2

// Reasons of a Gateway.
const (
	// ReasonValid: the trench file is written.
	ReasonValid = "Valid"
	// ReasonNotFound: the Gateway does not exist. The previous file stays in force.
	ReasonNotFound = "NotFound"
	// ReasonDeleting: the Gateway is being deleted. The previous file is in force until the pod ends.
	ReasonDeleting = "Deleting"
	// ReasonInvalid, of a Gateway: its translation is not a valid trench file. The previous file
	// stays in force. Of a GatewayRouter: the reader of the trench file refuses it.
	ReasonInvalid = "Invalid"
)

// Reasons of GatewayRouters.
const (
	// ReasonAccepted: the GatewayRouter is a gateway of the trench file.
	ReasonAccepted = "Accepted"
	// ReasonNameTooLong: the name is too long for a gateway of the trench file.
	ReasonNameTooLong = "NameTooLong"
	// ReasonInvalidAddress, of a GatewayRouter: spec.address is not a valid address of a router. Of a
	// Gateway: an address in its status is not a valid VIP, and is left out.
	ReasonInvalidAddress = "InvalidAddress"
	// ReasonInvalidASN: an AS number is reserved.
	ReasonInvalidASN = "InvalidASN"
	// ReasonAddressTaken: an older GatewayRouter has the address.
	ReasonAddressTaken = "AddressTaken"
	// ReasonInterfaceDiffers: an older GatewayRouter has a different interface.
	ReasonInterfaceDiffers = "InterfaceDiffers"
)
