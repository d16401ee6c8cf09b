#!/usr/bin/env bash
# check.sh BUILD: installs BUILD under a temporary prefix, moves that (nothing may depend on where it was),
# and uses the library in each way that a project can. CC and CFLAGS are those of BUILD.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd)
unset MAKEFLAGS MFLAGS MAKELEVEL DESTDIR
export CC=${CC:-cc} CFLAGS=${CFLAGS-}

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cmake --install "$build" --prefix "$tmp/first" >/dev/null
mv "$tmp/first" "$tmp/prefix"

try() { # try NAME CMAKE-ARGUMENT...
    cmake -S "$root/tests/consumer" -B "$tmp/$1" "${@:2}" >/dev/null
    cmake --build "$tmp/$1" --target consumer >/dev/null
    echo "$1: $("$tmp/$1/consumer")"
}
try find_package -DCMAKE_PREFIX_PATH="$tmp/prefix"
# Debug: builds the library once more, as fast as may be.
try add_subdirectory -DCSA_SUBDIRECTORY="$root" -DCMAKE_BUILD_TYPE=Debug -DCSA_CUDA=OFF

PKG_CONFIG_PATH=$(dirname "$(find "$tmp/prefix" -name csa.pc)")
export PKG_CONFIG_PATH
# Unquoted: these are lists of flags.
# shellcheck disable=SC2046,SC2086
"$CC" $CFLAGS "$root/tests/consumer/consumer.c" -o "$tmp/consumer" $(pkg-config --cflags --libs csa) \
    "-Wl,-rpath,$(pkg-config --variable=libdir csa)"
echo "pkg-config: $("$tmp/consumer")"

# The module is found beside the library: then it is the machine that has no GPU, not the installation no module.
if [ -e "$build/src/libcsa_cuda.so" ]; then
    [ -e "$(dirname "$(find "$tmp/prefix" -name libcsa.so)")/libcsa_cuda.so" ] || {
        echo "libcsa_cuda.so is not installed beside libcsa.so" >&2
        exit 1
    }
    echo "installed module: beside the library"
fi

if [ -e "$tmp/prefix/bin/csa" ]; then
    "$tmp/prefix/bin/csa" --help >/dev/null
    echo "installed command: runs"
fi
