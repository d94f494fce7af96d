"""Huge pages of a task: whether there are enough, and the limits that the kernel gets.

Pure. systemd has no property for the hugetlb controller, so a command of the host's own, before the
unit's, enables it down to the unit's cgroup and writes the limits (docs/adr/0100). Source: Linux,
Documentation/admin-guide/cgroup-v2.rst, HugeTLB; admin-guide/cgroup-v1/hugetlb.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.api import Resources, TaskSpec
from wire.units import about_size

SIZES = {"hugepages_2mib": 2 << 20, "hugepages_1gib": 1 << 30}
"""Fields of `resources`, and the size of a page in bytes."""
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
"""Enables the controller above a cgroup (its own, unless one is named), then writes its files."""
COMMAND = ("/bin/sh", "-c", _SCRIPT, "hugetlb")


def pages_of(resources: Resources) -> dict[int, int]:
    """Return the pages that a task asks for, by size in bytes; sizes without pages are left out."""
    found = {size: getattr(resources, field) for field, size in SIZES.items()}
    return {size: count for size, count in found.items() if count}


def refusal(
    spec: TaskSpec, others: Iterable[TaskSpec], pools: Mapping[int, int], *, controller: bool
) -> str:
    """Return why a task cannot have its huge pages, with the numbers; empty where it can.

    `pools` are the pages that the machine has, by size.
    """
    wanted, told = pages_of(spec.resources), {size: field for field, size in SIZES.items()}
    if wanted and not controller:
        return f"resources.{told[min(wanted)]}: its kernel has no hugetlb controller"
    others = list(others)
    for size, count in wanted.items():
        there, attempt = pools.get(size, 0), f"resources.{told[size]} {count} does not fit"
        taken = sum(pages_of(other.resources).get(size, 0) for other in others)
        if count + taken > there:
            hint = "" if there else "; its host profile makes them ([hugepages])"
            return (
                f"{attempt}: the machine has {there} pages of {about_size(size)}, and {taken} are"
                f" other tasks'{hint}"
            )
    return ""


def file_of(size: int, kind: str = "max") -> str:
    """Return the kernel's file for pages of a size: `hugetlb.2MB.max`."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"hugetlb.{size // unit}{name}.{kind}"
    return f"hugetlb.{size}B.{kind}"


def bounds(spec: TaskSpec, sizes: Iterable[int]) -> dict[str, str]:
    """Return what files of a task's cgroup say: it asked for so much, and of other sizes none.

    `rsvd` makes mmap(2) fail with ENOMEM; without it the task would get SIGBUS only when it
    touches a page too many.
    """
    wanted = pages_of(spec.resources)
    return {
        file_of(size, kind): str(size * wanted.get(size, 0))
        for size in sorted({*sizes, *wanted})
        for kind in ("rsvd.max", "max")
    }


def none_of(sizes: Iterable[int]) -> dict[str, str]:
    """Return the values of a cgroup's limit files that allow no huge pages."""
    return {file_of(size, kind): "0" for size in sorted(sizes) for kind in ("rsvd.max", "max")}


def lifted(sizes: Iterable[int]) -> dict[str, str]:
    """Return the values of a cgroup's limit files that set no bound."""
    return dict.fromkeys(none_of(sizes), NO_BOUND)


def command(cgroup: str, values: Mapping[str, str]) -> list[str]:
    """Return the command that writes values into a cgroup; none named: its own."""
    return [*COMMAND, cgroup, *(f"{name}={value}" for name, value in values.items())]


def bounded_unit(whole: Mapping[str, object], values: Mapping[str, str]) -> dict[str, object]:
    """Return a unit's properties with what bounds it before anything else of it is run."""
    if not values:
        return dict(whole)
    before = whole.get("ExecStartPre", ())
    assert isinstance(before, list | tuple)
    return {
        **whole,
        "ExecStartPre": [command("", values), *before],
        "RootDirectoryStartOnly": True,
    }


def bounded_inside(before: object) -> list[list[str]]:
    """Return what keeps huge pages from a command inside a task: they are the task's.

    `before` is what is run before the task's unit.
    """
    assert isinstance(before, list | tuple)
    mine: list[Sequence[str]] = [argv for argv in before if tuple(argv[:4]) == COMMAND]
    return [[*argv[:5], *(word.partition("=")[0] + "=0" for word in argv[5:])] for argv in mine]
