// Package gatewayapi pins the version of the Gateway API whose CustomResourceDefinitions tests
// install in their API server. No program depends on that module.
package gatewayapi

import "sigs.k8s.io/gateway-api/pkg/consts"

// Version of the CustomResourceDefinitions.
const Version = consts.BundleVersion
