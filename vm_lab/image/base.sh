#!/bin/bash
# Builds the base layer: Debian 13 on btrfs, everything but the project.
#
#   unshare --mount --propagation private base.sh OUT_DIR RECIPE_DIR PACKAGES
#
# Leaves in OUT_DIR: base.raw (sparse disk, no partition table), vmlinuz, modules/
# (the kernel's modules, for the initrd). PACKAGES is a comma-separated list.
set -euo pipefail
out=$1 recipe=$2 packages=$3

disk=$out/base.raw
mnt=$out/mnt
root=$mnt/@
mkdir -p "$mnt"
rm -f "$disk"
truncate --size=8G "$disk"
mkfs.btrfs --quiet --label twine-lab "$disk" 2>/dev/null
mount -o loop,noatime "$disk" "$mnt"
btrfs --quiet subvolume create "$root"
btrfs --quiet subvolume create "$mnt/@twine"

echo "step: install Debian 13 with mmdebstrap"
# INITRD=No: the hand-made initrd is used, so Debian's is not generated (10 s, 16 MB).
INITRD=No mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" \
    --aptopt='Acquire::Languages "none"' \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools"; echo "update_initramfs=no" > "$1/etc/initramfs-tools/update-initramfs.conf"' \
    --dpkgopt=force-confold --dpkgopt=force-unsafe-io \
    trixie "$root"

echo "step: configure the guest"
install -m 0755 "$recipe/customize.sh" "$root/root/customize.sh"
mount -t proc proc "$root/proc"
chroot "$root" /root/customize.sh
umount "$root/proc"
rm "$root/root/customize.sh"

kernel=$(ls "$root/usr/lib/modules")
cp "$root/boot/vmlinuz-$kernel" "$out/vmlinuz"
rm -rf "$out/modules"
mkdir -p "$out/modules/usr/lib/modules"
cp -a "$root/usr/lib/modules/$kernel" "$out/modules/usr/lib/modules/"
ln -s usr/lib "$out/modules/lib"
btrfs --quiet filesystem sync "$mnt"
fstrim "$mnt" # what dpkg wrote and deleted again becomes holes
umount "$mnt"
rmdir "$mnt"
