#!/bin/bash
# Builds the root file system of a program from Debian 13's archive, as a tar.
#
#   unshare --mount --propagation private program.sh OUT_TAR START_SCRIPT PACKAGES PATH...
#
# Packages (separated by commas) are unpacked, not installed. Only the given paths are taken, with the
# libraries they link to, a static busybox as shell, and the few files of /etc that libc reads.
set -euo pipefail
out=$1 start=$2 packages=$3
shift 3

tmp=$(mktemp -d)
trap 'umount "$tmp" 2>/dev/null || true; rmdir "$tmp" 2>/dev/null || true' EXIT
mount -t tmpfs -o mode=0755 tmpfs "$tmp"
all=$tmp/all
app=$tmp/app

echo "step: unpack $packages from Debian's archive"
mmdebstrap --quiet --mode=root --variant=extract --include="$packages,busybox-static,base-files,libc-bin" \
    --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' trixie "$all"

mkdir -p "$app"/{data,dev,etc,proc,run,sys,tmp,usr/bin,usr/lib/x86_64-linux-gnu,usr/lib64,var/tmp}
for dir in bin lib lib64 sbin; do
    ln -s "usr/${dir/sbin/bin}" "$app/$dir"
done
ln -s bin "$app/usr/sbin"
cp "$all/usr/bin/busybox" "$app/usr/bin/busybox"
for applet in sh cat sed tr mkdir rm hostname ls ps sleep wget env id nc; do
    ln -s busybox "$app/usr/bin/$applet"
done

for path in "$@"; do
    mkdir -p "$app$(dirname "${path/#\/usr\/sbin\//\/usr\/bin\/}")"
    cp -a "$all$path" "$app${path/#\/usr\/sbin\//\/usr\/bin\/}"
done
# What ldd prints of each program and library that was taken: "libx.so.1 => /lib/x86_64-linux-gnu/libx.so.1 (0x…)"
for path in "$@"; do
    find "$all$path" -type f \( -perm /111 -o -name '*.so*' \) -printf '%P\n' | while read -r below; do
        echo "$path${below:+/$below}"
    done
done | while read -r file; do
    head -c 4 "$all$file" | grep -q ELF || continue
    chroot "$all" /usr/bin/busybox sh -c \
        "LD_TRACE_LOADED_OBJECTS=1 /usr/lib64/ld-linux-x86-64.so.2 $file" 2>/dev/null |
        awk '$2 == "=>" && $3 ~ /^\// { print $3 }' || true
done | sort -u | while read -r lib; do
    cp -L "$all$lib" "$app/usr/lib/x86_64-linux-gnu/"
done
cp -L "$all/usr/lib64/ld-linux-x86-64.so.2" "$app/usr/lib64/"

install -m 0755 "$start" "$app/usr/bin/start"
cp "$all/usr/lib/os-release" "$app/etc/os-release"
printf 'root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$app/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$app/etc/group"
printf '127.0.0.1 localhost\n' >"$app/etc/hosts"
printf 'passwd: files\ngroup: files\nhosts: files dns\n' >"$app/etc/nsswitch.conf"
: >"$app/etc/resolv.conf" # mount points of what the host may bind here
: >"$app/etc/machine-id"
chmod 1777 "$app/tmp" "$app/var/tmp" "$app/data"

tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=gnu \
    -cf "$out.partial" -C "$app" .
mv "$out.partial" "$out"
