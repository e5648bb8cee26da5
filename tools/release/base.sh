#!/usr/bin/env bash
# Unpacks BIRD and its libraries from Debian 12 into DIR/root, for ARCH (amd64 or
# arm64), and lists the packages in DIR/packages. apt gets a state directory of its
# own: nothing is installed, and no root is needed.
set -euo pipefail
umask 022
arch=$1 dir=$2
# dash is the shell of the pod's init container, busybox has the tools of those who look into the pod. The libraries are checked below: apt
# would add what only an installation needs.
packages="bird2 busybox-static dash libc6 libcom-err2 libgcrypt20 libgpg-error0 libgssapi-krb5-2 libk5crypto3 libkeyutils1
	libkrb5-3 libkrb5support0 libreadline8 libssh-gcrypt-4 libtinfo6 zlib1g"

rm -rf "$dir"
mkdir -p "$dir"/{lists,cache/archives,debs}/partial "$dir/root"
dir=$(cd "$dir" && pwd)
apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' | sort -u | while read -r label mirror; do
	case $label in
	Debian) suites="bookworm bookworm-updates" ;;
	Debian-Security) suites=bookworm-security ;;
	*) continue ;;
	esac
	for suite in $suites; do
		echo "deb [arch=$arch signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
	done
done | sort -u >"$dir/sources.list"
[ -s "$dir/sources.list" ] || { echo "apt has no Debian mirror to take BIRD from" >&2; exit 1; }
touch "$dir/status"
apt() {
	timeout 300 apt-get "$@" -o Dir::Etc::SourceList="$dir/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$dir/lists" \
		-o Dir::State::status="$dir/status" -o Dir::Cache="$dir/cache" -o APT::Architecture="$arch" -o APT::Architectures="$arch" \
		-o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=2 >>"$dir/log" 2>&1 ||
		{ tail -n 5 "$dir/log" >&2; exit 1; }
}
apt update
cd "$dir/debs"
# shellcheck disable=SC2086 # one word for each package
apt download $packages
for deb in *.deb; do
	dpkg-deb -W --showformat='${Package} ${Version}\n' "$deb"
	dpkg-deb -x "$deb" "$dir/root"
done >"$dir/packages"
cd "$dir"
find root/usr/share/doc -type f ! -name copyright -delete
rm -rf lists cache debs status sources.list root/etc root/lib/systemd root/usr/lib/*/{gconv,krb5} \
	root/usr/share/{bug,doc-base,lintian,locale,man}

# Every library that BIRD or a library needs is there.
lacking=$(find root -type f \( -path '*/sbin/*' -o -name '*.so*' \) -exec sh -c 'readelf -d "$@" 2>/dev/null' sh {} + |
	sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u |
	while read -r library; do [ -n "$(find root -name "$library")" ] || echo "$library"; done)
[ -z "$lacking" ] || { echo "libraries of BIRD that no package of the list has:" $lacking >&2; exit 1; }
