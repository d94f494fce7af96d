"""Lists kernel objects of Twine: cgroups, namespaces, links and mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agent.machine import KernelObjects
from agent.machine.kernelfs import KernelFs
from agent.machine.mounts import read_mounts

_VETH = re.compile(r"tw[0-9a-f]{11}")
_UNIT = re.compile(r"twine-(task|step|in)-.*\.service")
_SLICE = "/sys/fs/cgroup/workload.slice"


def observe(fs: KernelFs, state: Path, run: Path) -> KernelObjects:
    """Return the objects that the kernel's files show; a missing file counts as empty. Blocking."""
    return KernelObjects(
        cgroups=tuple(sorted(_cgroups(fs))),
        namespaces=tuple(fs.names(f"{run}/netns")),
        veths={
            name: _task_in(fs.find(f"/sys/class/net/{name}/ifalias") or "")
            for name in fs.names("/sys/class/net")
            if _VETH.fullmatch(name)
        },
        mounts=tuple(sorted(_mounts(fs, (state, run)))),
    )


def _task_in(alias: str) -> str:
    """Return the task that a link's alias names: `twine TASK ADDRESS ADDRESS` (core/addresses)."""
    words = alias.split()
    return words[1] if len(words) > 1 and words[0] == "twine" else alias


def _cgroups(fs: KernelFs) -> set[str]:
    top = fs.path(_SLICE)
    cgroups = set()
    for folder, names, _ in os.walk(top):
        units = [name for name in names if _UNIT.fullmatch(name)]
        cgroups |= {"/workload.slice/" + str((Path(folder) / n).relative_to(top)) for n in units}
        names[:] = [name for name in names if name.endswith(".slice")]
    return cgroups


def _mounts(fs: KernelFs, tops: tuple[Path, ...]) -> set[str]:
    """Return the mount points of this process's namespace below folders."""
    points = (mount.point for mount in read_mounts(fs))
    return {point for point in points if any(point.startswith(f"{top}/") for top in tops)}
