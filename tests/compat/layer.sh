#!/bin/bash
# Makes what one image has on top of the base: packages installed and a set-up run in an overlay.
#
#   unshare --mount --propagation private layer.sh LOWER UPPER WORK DEBS PACKAGES SETUP
#
# LOWER are the folders below, as overlayfs wants them. `take FILE…` in a set-up copies programs and
# the libraries they link to into /out, for an image of these alone.
set -euo pipefail
lower=$1 upper=$2 work=$3 debs=$4 packages=$5 setup=$6
root=$work/root
mkdir -p "$root" "$work/work" "$upper"
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work/work" "$root"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount --bind "$debs" "$root/var/cache/apt/archives"
cat >"$work/run.sh" <<'INSIDE'
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin
take() {
    mkdir -p /out
    for one; do
        cp --parents -L "$one" /out
        for lib in $(ldd "$one" 2>/dev/null | grep -o '/[^ ]*'); do cp --parents -L "$lib" /out; done
    done
}
umask 022
[ -z "$1" ] || apt-get -qq -o Dpkg::Use-Pty=0 install -y --no-install-recommends $1 </dev/null >/dev/null
eval "$2"
INSIDE
cp "$work/run.sh" "$root/run.sh"
chroot "$root" /bin/sh /run.sh "$packages" "$setup"
rm "$root/run.sh"
