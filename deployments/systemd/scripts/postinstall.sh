#!/bin/sh
# Creates the users of the units. No unit is enabled or started.
set -e
systemd-sysusers vipgate.conf
[ ! -d /run/systemd/system ] || systemctl daemon-reload
