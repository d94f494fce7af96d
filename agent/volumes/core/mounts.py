"""What is mounted for a task before it starts: its volumes, and its root for an image's user.

A dynamic user has another number with each start, and files keep theirs. So what is on disk is
mounted in a way that shows the owner of the files as the task's user and back, by one shell of
the host's that gets the number (docs/adr/0076, 0118). Source: mount(8), X-mount.idmap.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import ImageUser, TaskSpec
from agent.api.volumes import VolumeKind
from agent.runtime.core.records import user_of
from agent.runtime.core.unit_parts import PAGE
from agent.volumes.core.volumes import OWNER, place_of

_SHELL = ("/usr/bin/nsenter", "--target=1", "--mount", "/bin/sh", "-c")
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
"""Puts the task's user before the others in the lists of the root, and mounts the root over itself
with the files of the image's user shown as the task's, those of root as they are, and those of
any other user as of the overflow user (65534). The folders that systemd expects are made before,
as every runtime does for an image of one program: in the mounted root systemd may make none
(EOVERFLOW). The user root (0:0) is that of a writable root: all files of the snapshot are root's
then, and root's are the task's; so all names of the lists get the task's number, and `chown www`,
`install -o www` and a change to the user www are what they would do here anyway: nothing. The
shell stays in the bare root, where it may write anywhere."""
_VOLUMES = (
    'while [ $# -gt 0 ]; do at=$root$2; [ "$(readlink -m "$at")" = "$at" ] || '
    '{ echo "the image has a link on the way to $2: no volume can be there" >&2; exit 1; }; '
    'if [ "$1" = folder ]; then mkdir -p -m 1777 "$at" || exit 1; shift 3; continue; fi; '
    'while umount -l "$at" 2>/dev/null; do :; done; mkdir -p "${bare-$root}$2" || exit 1; '
    'if [ "$1" = tmpfs ]; then mount -t tmpfs -o "$3,mode=1777,nosuid,nodev" tmpfs "$at"; else '
    'chown "$owner:$owner" "$1" && mount --bind -o "X-mount.idmap=b:$owner:$uid:1" "$1" "$at"; '
    "fi || exit 1; shift 3; done"
)
"""Makes a folder, or mounts each first path at the second below the root, files of the owner shown
as a dynamic user's. Nothing runs in the root at that time, so no link can appear after the check
for one. The top folder of a volume gets its owner here: the agent may not (docs/adr/0084)."""
_UNMOUNT = (
    'root=$(readlink -f "$1") || exit 0; shift; '
    'for at; do [ "$(readlink -m "$root$at")" = "$root$at" ] || continue; '
    'while umount -l "$root$at" 2>/dev/null; do :; done; done; true'
)
"""Where a task that may write put a link on the way, the mount stays until the root is deleted: by
the link the host would unmount one of its own."""


def mount_properties(
    task_id: str,
    spec: TaskSpec,
    state: str,
    root: str,
    user: ImageUser | None = None,
    run: Sequence[str] | None = None,
) -> dict[str, object]:
    """Return what a unit needs for its volumes and for its image's user; it goes on top of the
    hardening. Empty where there is neither.

    With `run`, the folders that the image has in its /run, that is in memory. It is mounted here
    and not by the unit's `TemporaryFileSystem=`, so that commands inside the task find its sockets
    there: they have the mounts of the root, but not those of the unit.

    Volumes are mounted into the task's root, which the unit takes with all mounts in it:
    `BindPaths=` would be done for the host's own commands of the unit, too, in the host's root.
    What is not named in `ReadWritePaths=` is read only (`ProtectSystem=strict`).
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
            else (f"{state}/{place_of(task_id, spec.entitlement, name, volume)}", volume.path, "")
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
        words = [*_shown(user, image), *words]
        paths.append("")  # the root itself, once nothing is mounted in it any more
    return {
        **({"ReadWritePaths": own} if own else {}),
        "ExecStartPre": [[*_SHELL, script, "sh", user_of(task_id), str(OWNER), root, *words]],
        "ExecStopPost": [[*_SHELL, _UNMOUNT, "sh", root, *paths]],
        "RootDirectoryStartOnly": True,
    }


def _shown(user: ImageUser, image: str) -> list[str]:
    """Return the words that the shell needs to show a root for its image's user.

    Root stays root, except as a group where it is the user's own: one number is shown once.
    """
    of_root = ("u:0:0:1" if user.uid else "") + (" g:0:0:1" if user.gid else "")
    who = (user.users, user.name, user.home, user.shell)
    return [image, of_root, *who, user.groups, user.group, f"{user.uid}:{user.gid}"]
