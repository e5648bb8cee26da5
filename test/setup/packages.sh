#!/usr/bin/env bash
# Installs Debian packages that are missing, so that no daemon starts: a
# policy-rc.d of 101 forbids it while apt runs. Units that exist are not touched.
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
	echo "missing: ${missing[*]}. This is not Debian or Ubuntu: install BIRD 2 (bird, birdc), iproute2 (ip) and their like with your package manager, then run this again." >&2
	exit 1
fi

policy=/usr/sbin/policy-rc.d
ours=
if [ ! -e $policy ]; then
	ours=1
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod +x $policy
fi
trap '[ -z "$ours" ] || rm -f '$policy EXIT

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
