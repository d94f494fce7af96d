#!/bin/bash
# Makes one layer on top of the base: files that installing Python wheels adds.
#
#   unshare --mount --propagation private project.sh BASE_RAW WHEELS OUT_TAR [LOWER_TAR]
#
# Runs the guest's own Python natively in an overlay of the base (much faster than
# pip and byte-compiling under TCG) and packs what changed. LOWER_TAR is a layer that
# is already there: without it the virtual environment is made first, with it the
# project's own set-up (`twine-agent install`) is done as well.
set -euo pipefail
base=$1 wheels=$2 out=$3 lower_tar=${4:-}

tmp=$(mktemp -d)
trap 'umount -R "$tmp" 2>/dev/null || true; rmdir "$tmp" 2>/dev/null || true' EXIT
mount -t tmpfs -o mode=0755 tmpfs "$tmp"
mkdir "$tmp"/{disk,lower,upper,work,root}
mount -o loop,ro,subvol=@ "$base" "$tmp/disk"
if [ -n "$lower_tar" ]; then
    tar -xf "$lower_tar" -C "$tmp/lower"
fi
mount -t overlay overlay "$tmp/root" \
    -o "lowerdir=$tmp/lower:$tmp/disk,upperdir=$tmp/upper,workdir=$tmp/work"
root=$tmp/root
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root/run/wheels"
mount --bind "$wheels" "$root/run/wheels"

if [ -z "$lower_tar" ]; then
    chroot "$root" python3 -m venv --system-site-packages --without-pip /opt/twine
    basename "$out" >"$root/opt/twine/deps-layer"
else
    basename "$out" >"$root/opt/twine/project-layer"
fi
pip=$(cd "$root" && echo usr/share/python-wheels/pip-*.whl)
if ls "$wheels"/*.whl >/dev/null 2>&1; then
    chroot "$root" env PYTHONDONTWRITEBYTECODE=1 /opt/twine/bin/python "/$pip/pip" --quiet install \
        --no-index --no-deps --compile --root-user-action=ignore --disable-pip-version-check \
        $(cd "$root" && ls -d run/wheels/*.whl | sed 's,^,/,')
fi
if [ -n "$lower_tar" ]; then
    for command in twine-agent sidekick; do
        mkdir -p "$root/usr/local/bin"
        ln -sf "/opt/twine/bin/$command" "$root/usr/local/bin/$command"
    done
    chroot "$root" env PYTHONDONTWRITEBYTECODE=1 /opt/twine/bin/twine-agent install --root /
    chroot "$root" systemd-sysusers
    if [ -e "$root/etc/systemd/system/sidekick-resume.service" ]; then
        chroot "$root" systemctl --quiet enable sidekick-resume.service sidekick-verify.timer
    fi
fi

umount -R "$root/dev" "$root/run/wheels" "$root/proc"
rmdir "$root/run/wheels"
rm -rf "$tmp/upper/root" "$tmp/upper/tmp" "$tmp/upper/run" "$tmp/upper/var/cache" "$tmp/upper/dev" "$tmp/upper/proc"
tar -cf "$out.partial" -C "$tmp/upper" .
mv "$out.partial" "$out"
