#!/usr/bin/env bash
# Builds the programs that tests run into bin/test/, as images have them: static and stripped. In
# crash/ lb kills itself at a step of a change of its data plane, in poisoned/ lb and frontend crash or
# hang after they accepted a VIP of package crash. Current programs are not built again.
set -euo pipefail
cd "$(dirname "$0")/../.."

out=bin/test
mkdir -p $out/crash $out/poisoned bin/tools
exec {lock}>$out/.lock
flock $lock
# The same flags as in the Makefile, so that both use one build cache.
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:-} -trimpath -buildvcs=false"
go build -ldflags '-s -w' -o $out/ ./cmd/... ./test/demo ./test/meridiotest/meridio-lb
go build -C tools -o ../bin/tools/ github.com/fullstorydev/grpcurl/cmd/grpcurl
ln -sfn ../tools $out/tools

# Overlays: no build of the product has these hooks. A pattern such as ./... does not match _overlay.
overlay() { # DIR PROGRAM... builds with the files of DIR/_overlay/ in place of those in pkg/
	local dir=$1 file separator=''
	shift
	{
		printf '{"Replace": {'
		(cd "$dir/_overlay" && find pkg -name '*.go' -type f) | sort | while read -r file; do
			printf '%s"%s": "%s"' "$separator" "$file" "$dir/_overlay/$file"
			separator=', '
		done
		printf '}}\n'
	} >"$dir/overlay.json"
	go build -ldflags '-s -w' -overlay="$dir/overlay.json" -o "$dir/" "$@"
}
# taste FILE FUNCTION VIPS writes FILE with a call of crash.Taste at the begin of a function.
taste() {
	local target=$out/poisoned/_overlay/$1
	mkdir -p "$(dirname "$target")"
	sed -e "/^func .* $2(/a crash.Taste($3)" -e 's|^import ($|&\n"github.com/vipgate/vipgate/test/crash"|' "$1" >"$target"
	[ "$(diff "$1" "$target" | grep -c '^>')" = 2 ] || {
		echo "$1 has no function $2, or more than one" >&2
		exit 1
	}
}
# The files of an earlier commit may replace others.
rm -rf $out/crash/_overlay $out/poisoned/_overlay
mkdir -p $out/crash/_overlay/pkg/dataplane
cat >$out/crash/_overlay/pkg/dataplane/crash.go <<-'END'
	package dataplane

	import "github.com/vipgate/vipgate/test/crash"

	func init() { afterStep = crash.After }
END
overlay $out/crash ./cmd/lb
taste pkg/frontend/configuration.go configure loaded.Config.Attractor.VIPs
taste pkg/lb/loop.go load x.Config.Attractor.VIPs
overlay $out/poisoned ./cmd/lb ./cmd/frontend

# Tests read it, so that Go's cache of test results knows the programs.
(cd $out && find . -type f -perm -u+x -exec sha256sum {} + | sort) >$out/.sums.new
cmp -s $out/.sums.new $out/sums || cp $out/.sums.new $out/sums
