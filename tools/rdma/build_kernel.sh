#!/usr/bin/env bash
# build_kernel.sh OUT: a User-Mode-Linux kernel with Soft-RoCE from Debian's kernel source, with kernel.config beside this.
# Needs gcc make flex bison bc xz-utils libc6-dev perl python3; about 15 CPU minutes and 2 GB of temporary space, once.
# The source package is only downloaded, never installed.
set -euo pipefail
out=$(realpath -m "${1:?usage: build_kernel.sh OUT}")
here=$(cd "$(dirname "$0")" && pwd)
source_package=${ISTHMUS_UML_SOURCE:-linux-source-6.12}

missing=()
for tool in gcc make flex bison bc xz perl apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "building the guest kernel needs: ${missing[*]} (Debian: apt install gcc make flex bison bc xz-utils libc6-dev)" >&2
    exit 3
fi

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cd "$build"
echo "downloading $source_package" >&2
apt-get download "$source_package" >/dev/null
dpkg-deb --fsys-tarfile "$source_package"_*.deb | tar -x "./usr/src/$source_package.tar.xz"
tar -xJf "usr/src/$source_package.tar.xz"
cd "$source_package"
# `allnoconfig` takes our file's values; an explicit "n" is spelled as a comment there.
sed -E 's/^(CONFIG_[A-Z0-9_]+)=n$/# \1 is not set/' "$here/kernel.config" >wanted.config
make ARCH=um KCONFIG_ALLCONFIG="$PWD/wanted.config" allnoconfig >/dev/null
for option in INFINIBAND_USER_ACCESS RDMA_RXE HOSTFS OVERLAY_FS VETH; do
    grep -q "^CONFIG_$option=y" .config || { echo "this kernel's configuration cannot have CONFIG_$option" >&2; exit 1; }
done
echo "compiling on $(nproc) CPUs" >&2
make ARCH=um -j"$(nproc)" linux >build.log 2>&1 || { tail -20 build.log >&2; exit 1; }
mkdir -p "$(dirname "$out")"
strip -o "$out.new" linux
mv "$out.new" "$out"
ls -l "$out" >&2
