# Makes $1, a tar of a small root file system with systemd as its init, from Debian packages that
# are installed here. Its only service of its own says who it is, and when it receives SIGTERM.
# If there is a $2, what that tar has is laid into it where nothing is yet.
set -e
at=$(mktemp -d -p /root)
packages="base-files base-passwd bash coreutils dash dbus debianutils findutils grep hostname
    init-system-helpers libc-bin login login.defs mount ncurses-base ncurses-bin passwd procps sed
    systemd systemd-sysv tar util-linux"
needed=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
    --no-breaks --no-replaces --no-enhances $packages | grep -v '^ ' | sort -u)
for package in $packages $needed; do dpkg -L "$package" 2>/dev/null || true; done | sort -u |
    grep -v -E '^/usr/share/(doc|man|locale|info|zoneinfo|lintian|bash-completion|perl)' |
    grep -v -E '^/usr/lib/(modules|python3|x86_64-linux-gnu/perl)' |
    while read -r file; do
        if [ -e "$file" ] && { [ ! -d "$file" ] || [ -L "$file" ]; }; then echo "$file"; fi
    done >"$at.list"
for link in /bin /lib /lib64 /sbin; do [ -L $link ] && echo $link; done >>"$at.list"
tar -C / -P -cf - -T "$at.list" | tar -C "$at" --strip-components=0 -xf - 2>/dev/null
for folder in proc sys dev run tmp root home var/log var/lib var/tmp etc/systemd/system; do
    mkdir -p "$at/$folder"
done
cp -a /etc/passwd /etc/group /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d "$at/etc/"
: >"$at/etc/machine-id"
rm -f "$at/etc/fstab"
wanted="$at/etc/systemd/system/multi-user.target.wants"
mkdir -p "$wanted"
cat >"$at/etc/systemd/system/hello.service" <<'UNIT'
[Service]
User=daemon
ExecStart=/bin/sh -c 'echo "hello: $(id -un) in $TWINE_TASK"; trap "echo hello: received SIGTERM; exit 0" TERM; while :; do sleep 1 & wait $!; done'
UNIT
ln -s ../hello.service "$wanted/hello.service"
[ -z "$2" ] || tar -C "$at" --skip-old-files -xf "$2"
tar -C "$at" -cf "$1" .
rm -rf "$at" "$at.list"
