#!/bin/bash
# Builds the demo application's root file system: nginx of Debian 13 and what it needs.
#
#   unshare --mount --propagation private app.sh OUT_TAR RECIPE_DIR VERSION
#
# Packages are unpacked, not installed, and only the server's own files are taken: the
# libraries it links to, a static busybox as shell, and the few files of /etc it reads.
set -euo pipefail
out=$1 recipe=$2 version=$3

tmp=$(mktemp -d)
trap 'umount "$tmp" 2>/dev/null || true; rmdir "$tmp" 2>/dev/null || true' EXIT
mount -t tmpfs -o mode=0755 tmpfs "$tmp"
all=$tmp/all
app=$tmp/app

echo "step: unpack nginx from Debian's archive"
mmdebstrap --quiet --mode=root --variant=extract --include=nginx,busybox-static,base-files,libc-bin \
    --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' trixie "$all"

mkdir -p "$app"/{dev,etc/nginx,proc,run,sys,tmp,usr/bin,usr/lib/x86_64-linux-gnu,usr/lib64,var/tmp}
for dir in bin lib lib64 sbin; do
    ln -s "usr/${dir/sbin/bin}" "$app/$dir"
done
ln -s bin "$app/usr/sbin"

cp "$all/usr/sbin/nginx" "$app/usr/bin/nginx"
cp "$all/usr/bin/busybox" "$app/usr/bin/busybox"
for applet in sh cat sed tr mkdir rm mkfifo hostname ls ps sleep wget env id; do
    ln -s busybox "$app/usr/bin/$applet"
done
# ldd of the unpacked system: prints "libx.so.1 => /lib/x86_64-linux-gnu/libx.so.1 (0x…)"
for lib in $(chroot "$all" /usr/bin/busybox sh -c \
    'LD_TRACE_LOADED_OBJECTS=1 /usr/lib64/ld-linux-x86-64.so.2 /usr/sbin/nginx' |
    awk '$2 == "=>" && $3 ~ /^\// { print $3 }'); do
    cp -L "$all/$lib" "$app/usr/lib/x86_64-linux-gnu/"
done
cp -L "$all/usr/lib64/ld-linux-x86-64.so.2" "$app/usr/lib64/"

cp "$all/etc/nginx/mime.types" "$app/etc/nginx/"
cp "$recipe/app-nginx.conf" "$app/etc/nginx/nginx.conf"
install -m 0755 "$recipe/app-start.sh" "$app/usr/bin/start"
echo "$version" >"$app/etc/demo-version"
case $version in
v3) echo 'limit_rate 100; # bytes in a second: a page takes a second or two' ;;
v4) echo 'if ($request_id ~ "^[0-7]") { return 500 "broken\n"; } # half of the requests' ;;
v5) echo 'limit_req zone=all burst=1000; # a task has a capacity, beyond which requests wait' ;;
esac >"$app/etc/nginx/version.conf"
cp "$all/usr/lib/os-release" "$app/etc/os-release"
printf 'root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$app/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$app/etc/group"
printf '127.0.0.1 localhost\n' >"$app/etc/hosts"
printf 'passwd: files\ngroup: files\nhosts: files dns\n' >"$app/etc/nsswitch.conf"
: >"$app/etc/resolv.conf" # mount points of what the host may bind here
: >"$app/etc/machine-id"
chmod 1777 "$app/tmp" "$app/var/tmp"
find "$app" -type f -perm /111 -exec chmod 0755 {} + -o -type f -exec chmod 0644 {} +

tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=gnu \
    -cf "$out.partial" -C "$app" .
mv "$out.partial" "$out"
