#!/bin/busybox sh
# PID 1 of the lab's initrd: load a fixed list of modules, mount the two
# subvolumes, hand over. No udev and no probing: this is what halves the boot.
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /sys /dev /run /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev

root=/dev/vda
panic=0
for word in $(cat /proc/cmdline); do
    case "$word" in
        root=*) root="${word#root=}" ;;
        panic=*) panic="${word#panic=}" ;;
    esac
done

# As Debian's own: with panic=N on the command line it does not wait for a user.
fail() {
    echo "initrd: $1" >/dev/console
    case "$panic" in
        '' | 0 | *[!0-9]*) sh ;;
        *) sleep "$panic" && reboot -f ;;
    esac
}

while read -r module; do
    insmod "/modules/$module" || echo "initrd: cannot load $module" >/dev/console
done </modules/order

tries=0
while [ ! -b "$root" ]; do
    tries=$((tries + 1))
    [ "$tries" -gt 300 ] && fail "no disk $root after 30 s"
    sleep 0.1
done
mount -t btrfs -o noatime,subvol=@ "$root" /root || fail "cannot mount subvolume @ of $root"
mount -t btrfs -o noatime,subvol=@twine "$root" /root/var/lib/twine ||
    fail "cannot mount subvolume @twine of $root"

umount /proc
umount /sys
mount --move /dev /root/dev
exec switch_root /root /sbin/init
