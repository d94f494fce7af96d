#!/bin/bash
# Puts the layers on a copy of the base disk and converts it for vagrant.
#
#   unshare --mount --propagation private disk.sh BASE_RAW OUT_QCOW2 LAYER_TAR...
set -euo pipefail
base=$1 out=$2
shift 2

disk=$out.raw
mnt=$(mktemp -d)
trap 'umount "$mnt" 2>/dev/null || true; rmdir "$mnt" 2>/dev/null || true; rm -f "$disk"' EXIT
cp --sparse=always "$base" "$disk"
if [ $# -gt 0 ]; then
    mount -o loop,noatime,subvol=@ "$disk" "$mnt"
    for layer in "$@"; do
        tar -xf "$layer" -C "$mnt"
    done
    touch "$mnt/etc/.updated" "$mnt/var/.updated"
    btrfs --quiet filesystem sync "$mnt"
    umount "$mnt"
fi
qemu-img convert -f raw -O qcow2 "$disk" "$out.partial"
mv "$out.partial" "$out"
