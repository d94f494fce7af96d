#!/bin/bash
# Makes a disk that a BIOS boots through GRUB of the root file system that the lab boots directly.
#
#   grub.sh ROOT_RAW OUT_RAW       (called by disk.sh, in its mount namespace)
#
# MBR with two partitions: ext4 for /boot, in which GRUB can note that an entry was tried
# (it cannot write btrfs), and the root as it is. A host kernel need not know partitions:
# each is reached by its offset.
set -euo pipefail
root_raw=$1 out=$2
boot_at=1 boot_mib=256 # MiB
root_at=$((boot_at + boot_mib))
root_mib=$(($(stat --format=%s "$root_raw") >> 20))

work=$(mktemp -d)
trap 'umount "$work/boot" "$work/root" 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/root" "$work/boot"
mount -o loop,noatime,subvol=@ "$root_raw" "$work/root"
root=$work/root

# --- /boot: what the root has there, GRUB's modules, its environment and the first menu
truncate --size=${boot_mib}M "$work/boot.raw"
mkfs.ext4 -q -L twine-boot -m 0 "$work/boot.raw"
mount -o loop,noatime "$work/boot.raw" "$work/boot"
cp -a "$root"/boot/. "$work/boot/"
mkdir -p "$work/boot/grub"
cp -a "$root/usr/lib/grub/i386-pc" "$work/boot/grub/"
rm -f "$work"/boot/grub/i386-pc/*.{img,exec,image} "$root"/boot/vmlinuz-* "$root"/boot/initrd.img-*
chroot "$root" grub-editenv - create 2>/dev/null || true
chroot "$root" grub-editenv /root/grubenv create
mv "$root/root/grubenv" "$work/boot/grub/grubenv"
kernel=$(basename "$work"/boot/vmlinuz-*)
cat >"$root/etc/default/grub" <<'DEFAULTS'
GRUB_DEFAULT=0
GRUB_TIMEOUT=0
GRUB_DISTRIBUTOR=Debian
GRUB_DISABLE_LINUX_UUID=true
GRUB_DISABLE_OS_PROBER=true
GRUB_DISABLE_RECOVERY=true
GRUB_TERMINAL=serial
GRUB_CMDLINE_LINUX="quiet console=ttyS0 net.ifnames=0 mitigations=off audit=0 norandmaps"
DEFAULTS
# As grub-mkconfig writes it, as far as it matters; `update-grub` in the guest replaces it.
cat >"$work/boot/grub/grub.cfg" <<MENU
if [ -s \$prefix/grubenv ]; then
  set have_grubenv=true
  load_env
fi
if [ "\${next_entry}" ] ; then
   set default="\${next_entry}"
   set next_entry=
   save_env next_entry
   set boot_once=true
else
   set default="0"
fi
serial --unit=0
terminal_input serial
terminal_output serial
set timeout=0
menuentry 'Debian GNU/Linux' --class debian \$menuentry_id_option 'gnulinux-simple' {
	insmod part_msdos
	insmod ext2
	set root='hd0,msdos1'
	linux	/$kernel root=/dev/vda2 rw quiet console=ttyS0 net.ifnames=0 mitigations=off audit=0 norandmaps
	initrd	/initrd.img-${kernel#vmlinuz-}
}
### BEGIN /etc/grub.d/41_custom ###
if [ -f  \${config_directory}/custom.cfg ]; then
  source \${config_directory}/custom.cfg
elif [ -z "\${config_directory}" -a -f  \$prefix/custom.cfg ]; then
  source \$prefix/custom.cfg
fi
### END /etc/grub.d/41_custom ###
MENU

# --- the guest mounts it itself: the lab's guests read no fstab
cat >"$root/etc/systemd/system/boot.mount" <<'UNIT'
[Unit]
Description=Kernels and the boot loader's files

[Mount]
What=/dev/vda1
Where=/boot
Type=ext4
Options=noatime

[Install]
WantedBy=local-fs.target
UNIT
chroot "$root" systemctl --quiet enable boot.mount

# --- the loader: its first sector in the MBR, the rest in the gap before the first partition
chroot "$root" grub-mkimage --format=i386-pc --output=/root/core.img --prefix='(hd0,msdos1)/grub' \
    biosdisk part_msdos ext2 normal linux configfile loadenv test echo serial terminal reboot
core=$root/root/core.img
[ "$(stat --format=%s "$core")" -le $(((boot_at << 20) - 512)) ]

truncate --size=$((root_at + root_mib))M "$out"
dd if="$root/usr/lib/grub/i386-pc/boot.img" of="$out" bs=440 count=1 conv=notrunc status=none
dd if="$core" of="$out" bs=512 seek=1 conv=notrunc status=none
rm "$core"

le32() { # a number as four bytes, least significant first, as printf takes them
    local n=$1
    printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) $((n >> 24 & 255))
}
partition() { # STATUS FIRST_MIB MIB: an entry of type 83 without cylinders
    printf '\\x%02x\\xfe\\xff\\xff\\x83\\xfe\\xff\\xff%s%s' "$1" "$(le32 $(($2 << 11)))" "$(le32 $(($3 << 11)))"
}
printf "$(partition 128 $boot_at $boot_mib)$(partition 0 $root_at $root_mib)" |
    dd of="$out" bs=1 seek=446 conv=notrunc status=none
printf '\x55\xaa' | dd of="$out" bs=1 seek=510 conv=notrunc status=none

umount "$work/boot"
btrfs --quiet filesystem sync "$root"
umount "$work/root"
dd if="$work/boot.raw" of="$out" bs=1M seek=$boot_at conv=notrunc,sparse status=none
dd if="$root_raw" of="$out" bs=1M seek=$root_at conv=notrunc,sparse status=none
