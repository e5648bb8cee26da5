#!/usr/bin/env bash
# Creates a Debian 12 root with systemd in DIR, once. The packages that docs/install.md installs beside
# vipgate are in its apt cache: the test has no network.
set -euo pipefail
dir=$1
[ ! -e "$dir/.complete" ] || exit 0
rm -rf "$dir"
mmdebstrap --quiet --variant=minbase --include=systemd --format=directory --skip=cleanup/apt \
	--aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--customize-hook='chroot "$1" apt-get -qq install --download-only bird2 iproute2 curl' \
	bookworm "$dir"
touch "$dir/.complete"
