"""Cores of a host, and lists of CPUs as the kernel writes them: `0-3,8`.

Source: Linux, Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


class Core(msgspec.Struct, frozen=True):
    """One core: its CPUs (hardware threads) that tasks may use, and its other CPUs."""

    cpus: tuple[int, ...]
    node: int = 0
    """Its NUMA node."""
    others: tuple[int, ...] = ()
    """CPUs that are online, but reserved by the host profile or the kernel command line."""

    @property
    def whole(self) -> bool:
        """Whether tasks may use all its CPUs."""
        return not self.others


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0-3,8`, sorted. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _RANGE.fullmatch(part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is not a processor or a range of them")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cpus))


def cpu_list_text(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel writes them; nothing for none."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
