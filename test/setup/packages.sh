#!/usr/bin/env bash
# Installs Debian packages that are missing, so that no daemon starts, neither
# now nor at the next boot. Units that exist already are not touched.
set -euo pipefail

missing=()
for package in "$@"; do
	case $package in
	bird2) command -v bird >/dev/null || [ -x /usr/sbin/bird ] || missing+=("$package") ;;
	iproute2) command -v ip >/dev/null || missing+=("$package") ;;
	*) dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package") ;;
	esac
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
	echo "missing: ${missing[*]}. This is not Debian or Ubuntu: install BIRD 2 (bird, birdc) and iproute2 (ip) with your package manager, then run this again." >&2
	exit 1
fi

# While apt runs, 101 says that no daemon may be started (policy-rc.d, invoke-rc.d(8)).
policy=/usr/sbin/policy-rc.d
mark="# written by vipgate while it installs packages"
if [ ! -e $policy ] || grep -qF "$mark" $policy; then # a killed run may have left it
	printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >$policy
	chmod +x $policy
	trap 'rm -f '$policy EXIT
fi

echo "installing: ${missing[*]}"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	rm -f "$log"
	echo "could not install ${missing[*]}; see above" >&2
	exit 1
fi
rm -f "$log"

# The package enables its unit for the next boot; the unit is new with it.
if [[ " ${missing[*]} " == *" bird2 "* ]] && command -v systemctl >/dev/null; then
	systemctl disable --quiet bird.service 2>/dev/null || true
fi
