#!/usr/bin/env bash
# packages.sh GROUP... installs the Debian packages of groups of packages.txt that are missing, so that
# no daemon starts, neither now nor at the next boot. Units that exist already are not touched.
set -euo pipefail

missing=()
for group in "$@"; do
	packages=$(sed -n "s/^$group: //p" "$(dirname "$0")/packages.txt")
	[ -n "$packages" ] || {
		echo "packages.txt has no group $group" >&2
		exit 1
	}
	for package in $packages; do
		case $package in
		bird2) command -v bird >/dev/null || [ -x /usr/sbin/bird ] || missing+=("$package") ;;
		iproute2) command -v ip >/dev/null || missing+=("$package") ;;
		*) dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package") ;;
		esac
	done
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
	echo "missing: ${missing[*]} (names of Debian). This is not Debian or Ubuntu: install BIRD 2 (bird, birdc), iproute2 (ip) and the others with your package manager, then run this again." >&2
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

enabled() { systemctl list-unit-files --state=enabled --no-legend 2>/dev/null | awk '{ print $1 }' | sort; }
manager=$(command -v systemctl || true)
before=$(enabled || true)
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

# A package enables its units for the next boot.
[ -z "$manager" ] || comm -13 <(echo "$before") <(enabled || true) | xargs -r systemctl disable --quiet 2>/dev/null || true
