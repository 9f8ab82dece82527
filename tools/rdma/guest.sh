#!/usr/bin/env bash
# guest.sh CMD [ARG...]: run CMD in a throw-away User-Mode-Linux guest that has two pairs of linked RDMA devices.
#
#   rxe0 on v0, 10.77.0.1  <== veth ==>  rxe1 on v1, 10.77.0.2      (Soft-RoCE: real verbs, software adapter)
#   rxe2 on v2, 10.77.2.1  <== veth ==>  rxe3 on v3, 10.77.2.2
#
# The guest sees this machine's files read-only with memory over them, runs CMD in the current folder with this
# environment, and its exit status is CMD's. Everything that it writes is lost, but for GUEST_SHARE, a folder that it
# may write to. 124: it ran longer than GUEST_TIMEOUT_S; 125: the guest itself failed. No root is needed on the host.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
kernel=$("$here/kernel.sh")
packages=$("$here/packages.sh")
memory=${GUEST_MEMORY:-2048M}
timeout_s=${GUEST_TIMEOUT_S:-600}

job=$(mktemp -d)
trap 'rm -rf "$job"' EXIT

# What to run: this folder, this environment, that command, each word quoted for a shell.
{
    printf 'cd %q\n' "$PWD"
    export -p | grep -vE '^declare -x (DISPLAY|TMPDIR|OLDPWD|SHLVL|SSH_[A-Z_]*)(=|$)'
    printf 'export PYTHONPATH=%q${PYTHONPATH:+:$PYTHONPATH}\n' "$packages/python"
    printf 'exec'
    printf ' %q' "$@"
    echo
} >"$job/command"

# First process of the guest. Its root is the host's, read-only: make a writable one and go there.
cat >"$job/init" <<INIT
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t tmpfs -o size=80% memory /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work root /mnt/root
cd /mnt/root
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts -o ptmxmode=666 devpts dev/pts
mount -t tmpfs shm dev/shm
mount -t tmpfs run run
mkdir run/job
mount -t hostfs -o $job none run/job
share=$(printf %q "${GUEST_SHARE:-}")
if [ -n "\$share" ]; then mkdir -p "./\$share"; mount -t hostfs -o "\$share" none "./\$share"; fi
exec chroot . /bin/bash /run/job/inside
INIT
chmod +x "$job/init"

# Second stage, in the writable root: libraries, network, devices, the command, the end.
{
    printf 'packages=%q\n' "$packages/root"
    cat <<'INSIDE'
exec </dev/null
# wire N PREFIX: vN and vN+1, linked, with a device each. Both ends are in one namespace (rxe knows no other): each must
# answer for its own address only, accept what comes from the other although that is local too, and route by the
# interface that a packet leaves from.
wire() {
    local one=v$1 two=v$(($1 + 1)) interface
    # Room for 4096 bytes of payload and the headers, so that the devices' MTU is 4096.
    ip link add "$one" mtu 4200 type veth peer name "$two" mtu 4200
    ip addr add "$2.1/24" dev "$one"
    ip addr add "$2.2/24" dev "$two"
    for interface in all "$one" "$two"; do
        echo 1 >"/proc/sys/net/ipv4/conf/$interface/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/$interface/rp_filter"
        echo 1 >"/proc/sys/net/ipv4/conf/$interface/arp_ignore"
        echo 2 >"/proc/sys/net/ipv4/conf/$interface/arp_announce"
    done
    ip link set "$one" up
    ip link set "$two" up
    ip rule add pref $((10 + $1)) oif "$one" lookup $((10 + $1))
    ip rule add pref $((11 + $1)) oif "$two" lookup $((11 + $1))
    ip route add "$2.0/24" dev "$one" src "$2.1" table $((10 + $1))
    ip route add "$2.0/24" dev "$two" src "$2.2" table $((11 + $1))
    rdma link add "rxe$1" type rxe netdev "$one"
    rdma link add "rxe$(($1 + 1))" type rxe netdev "$two"
}
prepare() {
    set -e
    cp -a "$packages/usr/." /usr/
    if [ -d "$packages/lib" ]; then cp -a "$packages/lib/." /usr/lib/; fi
    if [ -d "$packages/etc" ]; then cp -a "$packages/etc/." /etc/; fi
    ldconfig
    ip link set lo up
    ip rule add pref 100 lookup local
    ip rule del pref 0
    wire 0 10.77.0
    wire 2 10.77.2
}
status=125
if (prepare) >/run/job/log 2>&1; then
    ulimit -l unlimited
    ulimit -n 65536
    export ISTHMUS_TEST_RDMA_DEVICES=rxe0,rxe1,rxe2,rxe3
    exec 3>/dev/tty0
    stty -opost <&3 2>/dev/null || stty -opost </dev/tty0
    bash -c '. /run/job/command' 2>&1 | cat >&3
    status=${PIPESTATUS[0]}
fi
dmesg >/run/job/kernel_log 2>/dev/null
echo "$status" >/run/job/status
python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)' # RB_POWER_OFF
INSIDE
} >"$job/inside"

ended=0
timeout --kill-after=5 "$timeout_s" "$kernel" mem="$memory" rootfstype=hostfs hostfs=/ ro init="$job/init" \
    con=null con0=null,fd:3 stderr=1 quiet loglevel=0 </dev/null 3>&1 1>"$job/boot" 2>"$job/console" || ended=$?
status=$(cat "$job/status" 2>/dev/null || echo none)
if [ "$status" = none ] || [ "$status" = 125 ] || [ -n "${GUEST_VERBOSE:-}" ]; then
    tail -n 40 "$job/boot" "$job/console" "$job/log" "$job/kernel_log" >&2 2>/dev/null || true
fi
[ "$status" != none ] || status=$([ "$ended" = 124 ] && echo 124 || echo 125)
exit "$status"
