"""The mounts that are made before a task starts: its volumes, and its root for an image's user.

A dynamic user gets another user id at each start, but files keep their owner. So volumes and roots
are mounted with an id mapping between the owner of the files and the task's user. A shell on the
host gets the user id and makes the mounts (docs/adr/0076, 0118). Source: mount(8), X-mount.idmap.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import ImageUser, TaskSpec
from agent.api.volumes import VolumeKind
from agent.runtime.core.records import user_of
from agent.runtime.core.unit_parts import HOST_SHELL, PAGE
from agent.volumes.core.volumes import OWNER, path_of

_BEGIN = (
    'uid=$(readlink "/run/systemd/dynamic-uid/direct:$1") && root=$(readlink -f "$3") || exit 1; '
    "owner=$2; shift 3; "
)
_ROOT = (
    'say() { [ "$1" ] || return 0; at=$root/$1; [ "$(readlink -m "$at")" = "$at" ] || '
    '{ echo "there is a link on the way to $1: it is not written" >&2; return 1; }; '
    'rm -f "$at" && { printf "%s\n" "$2"; sed -E "$3" "$image/$1"; } >"$at"; }; '
    'fill() { for d in dev etc proc run sys tmp usr var; do [ -e "$d" ] || [ -L "$d" ] || '
    'mkdir "$d" || return 1; done; [ -L var ] || [ -L var/tmp ] || mkdir -p var/tmp || return 1; '
    "for d in bin lib lib64 sbin; do "
    '[ -e "$d" ] || [ -L "$d" ] || [ ! -d "usr/$d" ] || ln -s "usr/$d" "$d" || return 1; done; }; '
    'while umount -l "$root" 2>/dev/null; do :; done; image=$1; umask 022; cd "$root" && fill && '
    '{ [ "$9" != 0:0 ] || all="s/^([^:]*:[^:]*):[0-9]+:/\\1:$uid:/"; } && '
    'say "$3" "$4:x:$uid:$uid::$5:$6" "${all:+$all;s/^([^:]*:[^:]*:[^:]*):[0-9]+:/\\1:$uid:/}" && '
    'say "$7" "$8:x:$uid:" "$all" && { [ "$9" != 0:0 ] || '
    'find . -xdev "(" ! -uid 0 -o ! -gid 0 ")" -exec chown -h 0:0 -- {} +; } && '
    "mount --bind --make-private "
    '-o "nosuid,X-mount.idmap=${2:+$2 }u:${9%:*}:$uid:1 g:${9#*:}:$uid:1" "$root" "$root" || '
    "exit 1; "
    "shift 9; bare=.; "
)
"""Script that prepares the root of a task for its image's user.

It puts the task's user first in the root's passwd and group files. It mounts the root over itself
with mapped owners. Files of the image's user then belong to the task's user, files of root to root,
and all others to the overflow user (65534).

Before that, it creates the folders that systemd expects, as every container runtime does for an
image with a single program. In the mounted root systemd could not create them (EOVERFLOW).

The image user root (0:0) has a writable root. All files of the snapshot then belong to root, which
is mapped to the task's user. So all names in passwd and group get the task's user id: `chown www`,
`install -o www` and a change to the user www succeed and have no effect.

The shell's working directory stays the unmapped root, where it may write anywhere."""
_VOLUMES = (
    'while [ $# -gt 0 ]; do at=$root$2; [ "$(readlink -m "$at")" = "$at" ] || '
    '{ echo "the image has a link on the way to $2: no volume can be there" >&2; exit 1; }; '
    'if [ "$1" = folder ]; then mkdir -p -m 1777 "$at" || exit 1; shift 3; continue; fi; '
    'while umount -l "$at" 2>/dev/null; do :; done; mkdir -p "${bare-$root}$2" || exit 1; '
    'if [ "$1" = tmpfs ]; then mount -t tmpfs -o "$3,mode=1777,nosuid,nodev" tmpfs "$at"; else '
    'chown "$owner:$owner" "$1" && mount --bind -o "X-mount.idmap=b:$owner:$uid:1" "$1" "$at"; '
    "fi || exit 1; shift 3; done"
)
"""Script that creates folders and mounts volumes in the root, with the owner of the files mapped to
the dynamic user. No process runs in the root at that time, so no symbolic link can appear after the
check. The script sets the owner of a volume's top folder; the agent may not (docs/adr/0084)."""
_UNMOUNT = (
    'root=$(readlink -f "$1") || exit 0; shift; '
    'for at; do [ "$(readlink -m "$root$at")" = "$root$at" ] || continue; '
    'while umount -l "$root$at" 2>/dev/null; do :; done; done; true'
)
"""Script that unmounts the volumes. If the task has put a symbolic link into the path, the mount
stays until the root is deleted. Through the link the host would unmount one of its own mounts."""


def mount_properties(
    task_id: str,
    spec: TaskSpec,
    state: str,
    root: str,
    user: ImageUser | None = None,
    run: Sequence[str] | None = None,
) -> dict[str, object]:
    """Return the unit properties for the task's volumes and its image's user, empty without both.

    `run` are the folders that the image has in /run; with it, /run is in memory. It is not mounted
    by `TemporaryFileSystem=` of the unit: commands inside the task see the mounts of the root, but
    not those of the unit, and they need the task's sockets in /run.

    Volumes are mounted into the task's root, and the unit uses the root with all its mounts.
    `BindPaths=` would also mount them in the host's root, for those commands of the unit that run
    on the host. Paths that are not in `ReadWritePaths=` are read-only (`ProtectSystem=strict`).
    """
    if not spec.volumes and user is None:
        return {}
    in_run = [word for name in run or () for word in ("folder", f"/run/{name}", "")]
    if run is not None:
        size = spec.limits.memory_max_bytes // 2
        in_run = ["tmpfs", "/run", f"size={size},nr_inodes={size // PAGE}", *in_run]
    words = [
        word
        for name, volume in spec.volumes.items()
        for word in (
            ("tmpfs", volume.path, f"size={volume.max_bytes}")
            if volume.kind is VolumeKind.TMPFS
            else (f"{state}/{path_of(task_id, spec.entitlement, name, volume)}", volume.path, "")
        )
    ]
    paths = [volume.path for volume in spec.volumes.values()]
    own = [f"-+{v.path}" for v in spec.volumes.values() if v.kind is not VolumeKind.SHARED]
    words = [*in_run, *words]
    if run is not None:
        paths.append("/run")
    script = _BEGIN + (_ROOT if user else "") + (_VOLUMES if words else "")
    if user:
        image = f"{state}/images/{spec.image.removeprefix('sha256:')}"
        words = [*_root_arguments(user, image), *words]
        paths.append("")  # the root itself, after all mounts inside it
    return {
        **({"ReadWritePaths": own} if own else {}),
        "ExecStartPre": [[*HOST_SHELL, script, "sh", user_of(task_id), str(OWNER), root, *words]],
        "ExecStopPost": [[*HOST_SHELL, _UNMOUNT, "sh", root, *paths]],
        "RootDirectoryStartOnly": True,
    }


def _root_arguments(user: ImageUser, image: str) -> list[str]:
    """Return the arguments of `_ROOT` for an image's user.

    User and group 0 are mapped to themselves, unless they are the image user's own: an id can be
    mapped only once.
    """
    of_root = ("u:0:0:1" if user.uid else "") + (" g:0:0:1" if user.gid else "")
    account = (user.users, user.name, user.home, user.shell)
    return [image, of_root, *account, user.groups, user.group, f"{user.uid}:{user.gid}"]
