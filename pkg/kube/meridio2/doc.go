// Package meridio2 lets vipgate take the role of the router container in a load balancer pod of
// Meridio 2: it reads the objects that this router reads, and tells the cluster what the router
// tells it.
//
// [Translate] turns a Gateway and its GatewayRouters into the trench file. It is pure: the same
// objects give the same bytes in every pod, in whatever order they are listed. The file has no
// streams: with the readiness files lb-ready-<DistributionGroup> of Meridio 2's load balancer any of
// them makes every VIP ready, as for its router.
//
// [Gates] sets the readiness gates of the own Pod by which Meridio 2 chooses the next hops of the
// applications. [Events] reports what is refused.
package meridio2
