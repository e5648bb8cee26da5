// Package meridio2 lets vipgate replace the router container in a load balancer pod of Meridio 2.
// It reads the same objects as this router, and reports the same state to the cluster.
//
// [Translate] translates a Gateway and its GatewayRouters into the trench file. It is pure: the
// same objects, in any order, result in the same bytes in every pod. The file has no streams: any
// readiness file lb-ready-<DistributionGroup> of Meridio 2's load balancer makes every VIP ready,
// as for Meridio 2's router.
//
// [Gates] sets the readiness gates of the pod, by which Meridio 2 selects the next hops of the
// applications. [Events] reports refused objects.
package meridio2
