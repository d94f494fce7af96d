#!/bin/bash
# Puts the layers on a copy of the base disk and converts it for vagrant.
#
#   unshare --mount --propagation private disk.sh BASE_RAW OUT_QCOW2 LOADER LAYER_TAR...
#
# LOADER is "none" for a disk without a boot loader, or "grub".
set -euo pipefail
base=$1 out=$2 loader=$3
shift 3

# The copy is made in memory: only the result is written to the host's disk.
tmp=$(mktemp -d)
trap 'umount -R "$tmp" 2>/dev/null || true; rmdir "$tmp" 2>/dev/null || true' EXIT
mount -t tmpfs -o mode=0700 tmpfs "$tmp"
disk=$tmp/disk.raw
mnt=$tmp/mnt
mkdir "$mnt"
cp --sparse=always "$base" "$disk"
if [ $# -gt 0 ]; then
    mount -o loop,noatime,subvol=@ "$disk" "$mnt"
    for layer in "$@"; do
        tar -xf "$layer" -C "$mnt"
    done
    # A kexec from within boots with the initrd that the lab boots with.
    for kernel in "$mnt"/boot/vmlinuz-*; do
        cp "${base%/*}/initrd" "$mnt/boot/initrd.img-${kernel##*/vmlinuz-}"
    done
    # Rivals are started by the bench that measures them.
    rm -f "$mnt/etc/systemd/system/multi-user.target.wants/tuned.service"
    touch "$mnt/etc/.updated" "$mnt/var/.updated"
    btrfs --quiet filesystem sync "$mnt"
    fstrim "$mnt"
    umount "$mnt"
fi
if [ "$loader" = grub ]; then
    bash "${0%/*}/grub.sh" "$disk" "$tmp/grub.raw"
    mv "$tmp/grub.raw" "$disk"
fi
qemu-img convert -f raw -O qcow2 "$disk" "$out.partial"
mv "$out.partial" "$out"
