#!/usr/bin/env bash
# Creates a Debian 12 root with systemd in DIR, once. The packages that docs/install.md, make demo and
# make test install are in its apt cache: the test has no network.
set -euo pipefail
dir=$1
packages=$(sed -En 's/^(demo|test): //p' "$(dirname "$0")/../setup/packages.txt" | paste -sd' ')
[ "$(cat "$dir/.complete" 2>/dev/null)" != "$packages" ] || exit 0
rm -rf "$dir"
mmdebstrap --quiet --variant=minbase --include=systemd --format=directory --skip=cleanup/apt \
	--aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--customize-hook='chroot "$1" apt-get -qq install --download-only '"$packages" \
	bookworm "$dir"
echo "$packages" >"$dir/.complete"
