"""Huge pages of a task: whether there are enough, and the kernel's limits for them.

Pure. systemd has no property for the hugetlb controller. So a command on the host, which runs
before the unit's own, enables it down to the unit's cgroup and writes the limits (docs/adr/0100).
Source: Linux, Documentation/admin-guide/cgroup-v2.rst, HugeTLB; cgroup-v1/hugetlb.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.api import Resources, TaskSpec
from wire.units import about_size

SIZES = {"hugepages_2mib": 2 << 20, "hugepages_1gib": 1 << 30}
"""Field of `resources` → the size of a page in bytes."""
NO_BOUND = "max"

_SCRIPT = (
    "set -e; own=$1; shift; "
    '[ "$own" ] || IFS=: read -r _ _ own </proc/self/cgroup; '
    "at=; rest=${own%/*}; rest=${rest#/}; "
    "while :; do echo +hugetlb >/sys/fs/cgroup$at/cgroup.subtree_control; "
    '[ "$rest" ] || break; at=$at/${rest%%/*}; '
    "case $rest in */*) rest=${rest#*/};; *) rest=;; esac; done; "
    'for word; do echo "${word#*=}" >"/sys/fs/cgroup$own/${word%%=*}"; done'
)
"""Script that enables the controller above a cgroup and writes the cgroup's files. Without a named
cgroup it uses its own."""
COMMAND = ("/bin/sh", "-c", _SCRIPT, "hugetlb")


def pages_of(resources: Resources) -> dict[int, int]:
    """Return the number of pages that a task requests, by size in bytes; without zeros."""
    counts = {size: getattr(resources, field) for field, size in SIZES.items()}
    return {size: count for size, count in counts.items() if count}


def refusal(
    spec: TaskSpec, others: Iterable[TaskSpec], pools: Mapping[int, int], *, controller: bool
) -> str:
    """Return why a task cannot have its huge pages, with the numbers; empty if it can.

    `pools` has the number of the machine's pages by size.
    """
    wanted, fields = pages_of(spec.resources), {size: field for field, size in SIZES.items()}
    if wanted and not controller:
        return f"resources.{fields[min(wanted)]}: its kernel has no hugetlb controller"
    others = list(others)
    for size, count in wanted.items():
        available, attempt = pools.get(size, 0), f"resources.{fields[size]} {count} does not fit"
        taken = sum(pages_of(other.resources).get(size, 0) for other in others)
        if count + taken > available:
            hint = "" if available else "; its host profile sets them up ([hugepages])"
            return (
                f"{attempt}: the machine has {available} pages of {about_size(size)}, and "
                f"other tasks hold {taken}{hint}"
            )
    return ""


def file_of(size: int, kind: str = "max") -> str:
    """Return the kernel's file for pages of a size: `hugetlb.2MB.max`."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"hugetlb.{size // unit}{name}.{kind}"
    return f"hugetlb.{size}B.{kind}"


def bounds(spec: TaskSpec, sizes: Iterable[int]) -> dict[str, str]:
    """Return the limit files of a task's cgroup: the requested pages, and none of other sizes.

    With `rsvd` mmap(2) fails with ENOMEM at the limit. Without it the task would get SIGBUS when it
    touches a page above the limit.
    """
    wanted = pages_of(spec.resources)
    return {
        file_of(size, kind): str(size * wanted.get(size, 0))
        for size in sorted({*sizes, *wanted})
        for kind in ("rsvd.max", "max")
    }


def zero_limits(sizes: Iterable[int]) -> dict[str, str]:
    """Return the values of a cgroup's limit files that allow no huge pages."""
    return {file_of(size, kind): "0" for size in sorted(sizes) for kind in ("rsvd.max", "max")}


def unlimited(sizes: Iterable[int]) -> dict[str, str]:
    """Return the values of a cgroup's limit files that set no limit."""
    return dict.fromkeys(zero_limits(sizes), NO_BOUND)


def command(cgroup: str, values: Mapping[str, str]) -> list[str]:
    """Return the command that writes values into a cgroup; an empty name means its own."""
    return [*COMMAND, cgroup, *(f"{name}={value}" for name, value in values.items())]


def with_page_limits(whole: Mapping[str, object], values: Mapping[str, str]) -> dict[str, object]:
    """Return a unit's properties with a first step that writes these limits."""
    if not values:
        return dict(whole)
    before = whole.get("ExecStartPre", ())
    assert isinstance(before, list | tuple)
    return {
        **whole,
        "ExecStartPre": [command("", values), *before],
        "RootDirectoryStartOnly": True,
    }


def no_pages_steps(before: object) -> list[list[str]]:
    """Return the steps that give a command inside a task no huge pages.

    `before` is `ExecStartPre` of the task's unit.
    """
    assert isinstance(before, list | tuple)
    steps: list[Sequence[str]] = [argv for argv in before if tuple(argv[:4]) == COMMAND]
    return [[*argv[:5], *(word.partition("=")[0] + "=0" for word in argv[5:])] for argv in steps]
