"""A root that its task may write to: which folders, as whose, and what becomes of the unit.

Pure. `DynamicUser=` makes the whole root read-only and systemd 257 lets no property take that back,
so each folder at its top is named. /home and /root stay closed by themselves; the folders in them
are named. /run is in memory, with the folders that the image has there (volumes/core/mounts.py):
systemd makes places of its own in it, which the kernel refuses in a root that is shown for its
task's user (docs/adr/0176).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agent.api import ImageUser, OciConfig, Relaxation, RootMode, TaskSpec
from agent.api.volumes import VolumeKind
from agent.runtime.core.records import has_own_init

CLOSED = frozenset(("boot", "dev", "lost+found", "proc", "sys", "tmp"))
"""Folders at the top of a root that are not its task's: of the kernel, or private already."""
ENTERED = ("home", "root", "run")
"""Folders at the top that are not opened whole, but by what is in them."""
TOPS_MAX = 64
"""Each is a mount; an image with more keeps the others read-only."""
BELOW_MAX = 16
_OF_SYSTEMD = frozenset(("credentials", "host", "systemd", "twine-identity", "user"))
"""Folders that systemd, or the agent, makes in each unit's /run."""


def is_writable(spec: TaskSpec, config: OciConfig | None, *, can_bound: bool) -> bool:
    """Return whether a task may write to its root.

    Without a word of its owner an OCI image may, as in every other runtime, where the host can
    bound it (`can_bound`). A machine writes to memory, and `raw` is no user without rights.
    """
    if has_own_init(spec) or Relaxation.RAW in spec.relaxations:
        return False
    if spec.root is None:
        return config is not None and can_bound
    return spec.root is RootMode.WRITABLE


def owner_of_root(users: str, groups: str) -> ImageUser:
    """Return the user of an image that names none: root's files are shown as the task's own.

    `users` and `groups` are the places of the image's lists, empty where it has none.
    """
    return ImageUser(
        uid=0,
        gid=0,
        name="root" if users else "",
        home="/root",
        shell="/bin/sh",
        users=users,
        group="root" if groups else "",
        groups=groups,
    )


def opened(unit: Mapping[str, object], spec: TaskSpec, tops: Sequence[str]) -> dict[str, object]:
    """Return what of a unit lets its task write below the folders `tops` of its root.

    What other tasks share with it stays read-only.
    """
    named = [f"-+/{name}" for name in tops if not name.startswith("run/")]
    shared = [f"-+{v.path}" for v in spec.volumes.values() if v.kind is VolumeKind.SHARED]
    found: dict[str, object] = {
        "ReadWritePaths": [*named, "-+/run", *_texts(unit.get("ReadWritePaths"))]
    }
    if shared:
        found["ReadOnlyPaths"] = (*_texts(unit.get("ReadOnlyPaths")), *shared)
    return found


def in_run(tops: Sequence[str]) -> list[str]:
    """Return the names of the folders in /run among those that a writable root opens."""
    return [name.removeprefix("run/") for name in tops if name.startswith("run/")]


def choose_tops(folders: Mapping[str, Collection[str]]) -> list[str]:
    """Return the folders that a writable root opens, as paths below it.

    `folders` are those at the image's top (under ""), and in each of its /home, /root and /run.
    """
    closed = {*CLOSED, *ENTERED}
    tops = [name for name in sorted(folders[""]) if name not in closed and _is_plain(name)]
    found = tops[:TOPS_MAX]
    for above in ENTERED:
        inner = [n for n in sorted(folders.get(above, ())) if n not in _OF_SYSTEMD and _is_plain(n)]
        found += [f"{above}/{name}" for name in inner[:BELOW_MAX]]
    return found


def _is_plain(name: str) -> bool:
    return name.isprintable() and not {*name} & {*":\\\"'$% "}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list | tuple) else ()
