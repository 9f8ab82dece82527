#!/usr/bin/env bash
# packages.sh: print a folder with the verbs libraries, pyverbs and the network tools of Debian, unpacked in its `root`,
# not installed; its `python` is for PYTHONPATH.
# (Installing python3-pyverbs would upgrade udev; nothing of the host is changed.) Cached; made anew with --fresh.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/isthmus/rdma
# iproute2's `rdma` and `ip` and what the libraries link to.
packages=(
    ibverbs-providers libibverbs1 librdmacm1 libibumad3 python3-pyverbs iproute2
    libnl-3-200 libnl-route-3-200 libelf1 libmnl0 libbpf1 libcap2 libxtables12 libtirpc3 libdb5.3
)
release=$(. /etc/os-release && echo "$ID-$VERSION_ID")
folder=$cache/packages-$release-$(dpkg --print-architecture)
if [ "${1:-}" = --fresh ] || [ ! -e "$folder/complete" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/root" "$folder/deb"
    cd "$folder/deb"
    for package in "${packages[@]}"; do
        apt-get download "$package" >/dev/null 2>&1 || echo "$package: not in this release's archive" >&2
    done
    for archive in *.deb; do
        dpkg-deb --extract "$archive" "$folder/root"
    done
    ls "$folder/root/usr/lib"/*/libibverbs.so.1 >/dev/null
    # pyverbs alone, without the rest of Debian's Python: for the search path of another interpreter of that version.
    mkdir "$folder/python"
    ln -s ../root/usr/lib/python3/dist-packages/pyverbs "$folder/python/pyverbs"
    touch "$folder/complete"
fi
echo "$folder"
