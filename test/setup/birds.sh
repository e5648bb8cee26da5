#!/usr/bin/env bash
# Unpacks newer BIRDs from other Debian suites into bin/birds/VERSION/bird, beside
# the system: apt gets a state directory of its own, nothing is installed, and the
# binaries find their loader and libraries in bin/birds/lib. What cannot be had is
# named and no failure: the tests list the versions that they lack.
set -euo pipefail
cd "$(dirname "$0")/../.."

birds=$PWD/bin/birds
[ ! -e "$birds/.complete" ] || exit 0
rm -rf "$birds"
mkdir -p "$birds/lib"

missing() {
	echo "no other BIRD versions: $1" >&2
	exit 0
}
for tool in apt-get dpkg-deb; do
	command -v $tool >/dev/null || missing "$tool is not installed"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The mirror that this machine uses, with other suites.
mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' | awk '$1 == "Debian" { print $2; exit }')
[ -n "$mirror" ] || missing "apt has no Debian mirror"
mkdir -p "$work"/{lists,cache/archives,debs}/partial
for suite in trixie sid; do
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
done >"$work/sources.list"
apt() {
	timeout 120 "$@" -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists" \
		-o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=2 \
		-o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false >>"$work/log" 2>&1
}
failed() {
	tail -n 5 "$work/log" >&2
	missing "$1"
}
apt apt-get update || failed "their package lists cannot be read"
cd "$work/debs"
apt apt-get download bird2/trixie bird3/trixie libc6/trixie libreadline8t64/trixie libssh-4/trixie libssl3t64/trixie libtinfo6/trixie patchelf/trixie ||
	failed "the packages cannot be downloaded"
apt apt-get download bird2/sid bird3/sid || echo "the newest BIRDs cannot be downloaded" >&2

for deb in lib*.deb patchelf*.deb; do
	dpkg-deb -x "$deb" "$work/root"
done
find "$work/root" -path '*/gconv' -prune -o ! -type d \( -name '*.so' -o -name '*.so.*' \) -exec cp -L {} "$birds/lib/" \;
loader=$(echo "$birds"/lib/ld-linux*.so.*)
for deb in bird*.deb; do
	rm -rf "$work/bird"
	dpkg-deb -x "$deb" "$work/bird"
	bird=$work/bird/usr/sbin/bird
	"$loader" --library-path "$birds/lib" "$work/root/usr/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$birds/lib" "$bird"
	version=$("$bird" --version 2>&1 | awk '{ print $3 }')
	mkdir -p "$birds/$version"
	mv "$bird" "$birds/$version/bird"
	echo "BIRD $version"
done
touch "$birds/.complete"
