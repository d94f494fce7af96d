"""A root that its task may write to: the writable folders, their owner, and the unit's properties.

Pure. `DynamicUser=` makes the whole root read-only, and no property of systemd 257 reverts that. So
each folder at the top of the root is made writable by its name. /home and /root themselves stay
read-only; the folders in them are made writable. /run is in memory, with the image's folders in it
(volumes/core/mounts.py). systemd creates mount points in /run, which the kernel refuses in a root
that is id-mapped for the task's user (docs/adr/0176).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agent.api import ImageUser, OciConfig, Relaxation, RootMode, TaskSpec
from agent.api.volumes import VolumeKind
from agent.runtime.core.records import has_own_init
from agent.runtime.core.unit_parts import texts

NOT_WRITABLE = frozenset(("boot", "dev", "lost+found", "proc", "sys", "tmp"))
"""Folders at the top of a root that stay read-only: they are the kernel's, or private already."""
WRITABLE_BELOW = ("home", "root", "run")
"""Folders at the top whose subfolders are made writable instead of the whole folder."""
TOPS_MAX = 64
"""Most writable folders at the top. Each is a mount; further folders stay read-only."""
BELOW_MAX = 16
"""Most writable folders in each of `WRITABLE_BELOW`."""
_OF_SYSTEMD = frozenset(("credentials", "host", "systemd", "twine-identity", "user"))
"""Folders that systemd, or the agent, makes in each unit's /run."""


def is_writable(spec: TaskSpec, config: OciConfig | None, *, has_quotas: bool) -> bool:
    """Return whether a task may write to its root.

    By default a task of an OCI image may, as in other runtimes, if the host can limit the size
    of its root (`has_quotas`). A task with its own init writes to memory. A `raw` task runs as root
    without a sandbox.
    """
    if has_own_init(spec) or Relaxation.RAW in spec.relaxations:
        return False
    if spec.root is None:
        return config is not None and has_quotas
    return spec.root is RootMode.WRITABLE


def owner_of_root(users: str, groups: str) -> ImageUser:
    """Return the user of an image that names none: files of root appear as files of the task.

    `users` and `groups` are the paths of the image's lists, empty if it has none.
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


def writable_root_properties(
    unit: Mapping[str, object], spec: TaskSpec, folders: Sequence[str]
) -> dict[str, object]:
    """Return the unit properties that allow writing below some folders of a root.

    Shared volumes stay read-only.
    """
    named = [f"-+/{name}" for name in folders if not name.startswith("run/")]
    shared = [f"-+{v.path}" for v in spec.volumes.values() if v.kind is VolumeKind.SHARED]
    properties: dict[str, object] = {
        "ReadWritePaths": [*named, "-+/run", *texts(unit.get("ReadWritePaths"))]
    }
    if shared:
        properties["ReadOnlyPaths"] = (*texts(unit.get("ReadOnlyPaths")), *shared)
    return properties


def in_run(folders: Sequence[str]) -> list[str]:
    """Return the names of those writable folders that are in /run."""
    return [name.removeprefix("run/") for name in folders if name.startswith("run/")]


def choose_writable_folders(folders: Mapping[str, Collection[str]]) -> list[str]:
    """Return the writable folders of a writable root, as relative paths.

    `folders` has the folders at the image's top (key ""), and those in its /home, /root and /run.
    """
    excluded = {*NOT_WRITABLE, *WRITABLE_BELOW}
    top = [n for n in sorted(folders[""]) if n not in excluded and _is_plain(n)]
    chosen = top[:TOPS_MAX]
    for above in WRITABLE_BELOW:
        inner = [n for n in sorted(folders.get(above, ())) if n not in _OF_SYSTEMD and _is_plain(n)]
        chosen += [f"{above}/{name}" for name in inner[:BELOW_MAX]]
    return chosen


def _is_plain(name: str) -> bool:
    return name.isprintable() and not {*name} & {*":\\\"'$% "}
