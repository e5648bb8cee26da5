package main

import "time"

// nspFlags are the flags of the NSP, which replaces the trench file.
type nspFlags struct {
	ConfigSource     string        `help:"Source of VIPs and gateways: file (--trench-file), nsp (--nsp-service), or auto: the NSP if --nsp-service is given and the trench file does not exist." enum:"auto,file,nsp" default:"auto" group:"NSP"`
	NSPService       string        `name:"nsp-service" help:"Host and port of Meridio's NSP." placeholder:"HOST:PORT" group:"NSP"`
	TrenchName       string        `help:"Trench of the frontend at the NSP." placeholder:"NAME" group:"NSP"`
	AttractorName    string        `help:"Attractor of the frontend at the NSP." placeholder:"NAME" group:"NSP"`
	NSPEntryTimeout  time.Duration `name:"nsp-entry-timeout" help:"How often the registration at the NSP is refreshed; the NSP removes it after 60s." default:"30s" group:"NSP"`
	NSPKeepaliveTime time.Duration `name:"nsp-keepalive-time" help:"How long the connection to the NSP is silent before it is probed; at least 10s." default:"30s" group:"NSP"`
}
