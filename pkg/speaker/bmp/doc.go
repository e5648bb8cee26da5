// Package bmp is a monitoring station of the BGP Monitoring Protocol (RFC 7854). It follows the
// sessions of one BGP speaker and, if the speaker sends Adj-RIB-Out (RFC 8671), the VIPs that the
// speaker sends to each peer.
package bmp
