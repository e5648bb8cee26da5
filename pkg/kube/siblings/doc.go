// Package siblings notifies the frontend of a trench pod which VIPs the other pods of the trench
// advertise, so that a drain of the last advertiser is refused.
//
// It sends nothing while the reports of the pods may be outdated; the frontend then forgets, and
// refuses every drain of VIPs without force.
package siblings
