// Package nodedrain drains the VIPs of a trench pod while its node has the label vipgate.io/drain.
//
// It does so only for a Trench with spec.nodeDrain, and reads no Nodes otherwise. A cordon has no
// effect. The pod does not begin a drain while it advertises a VIP that no pod on another node
// advertises; pods on nodes with the label do not count. A file records that this package drained
// the frontend, so that only such a drain is ended, also by a later process.
package nodedrain
