#!/usr/bin/env bash
# kernel.sh [--cached]: print the path of a guest kernel, making one if there is none.
# ISTHMUS_UML_KERNEL names a prebuilt one (as it is, or compressed with xz). Otherwise it is built from Debian's source
# into the user's cache. --cached: exit 4 rather than build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/isthmus/rdma

fingerprint() { cat "$@" | sha256sum | cut -c1-16; }

named=${ISTHMUS_UML_KERNEL:-}
if [ -n "$named" ]; then
    [ -r "$named" ] || { echo "ISTHMUS_UML_KERNEL names $named, which cannot be read" >&2; exit 3; }
    case $named in
    *.xz)
        kernel=$cache/prebuilt-$(fingerprint "$named")
        if [ ! -x "$kernel" ]; then
            mkdir -p "$cache"
            xz -dc "$named" >"$kernel.new"
            chmod +x "$kernel.new"
            mv "$kernel.new" "$kernel"
        fi
        ;;
    *) kernel=$named ;;
    esac
else
    kernel=$cache/linux-$(fingerprint "$here/kernel.config" "$here/build_kernel.sh")
    if [ ! -x "$kernel" ]; then
        if [ "${1:-}" = --cached ]; then
            echo "no guest kernel in $cache and none named by ISTHMUS_UML_KERNEL; \`make rdma-kernel\` builds one" >&2
            exit 4
        fi
        "$here/build_kernel.sh" "$kernel" >&2
    fi
fi
echo "$kernel"
