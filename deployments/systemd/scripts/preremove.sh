#!/bin/sh
# Stops the units at a removal (Debian: remove, RPM: 0), not at an upgrade: which pod restarts
# when is the operator's decision.
set -e
case "$1" in
remove | 0) [ ! -d /run/systemd/system ] || systemctl disable --now --quiet 'vipgate-frontend.service' 'vipgate-lb.service' 'vipgate-target.service' 'vipgate-target-add@*.service' 'vipgate-probe.service' || true ;;
esac
