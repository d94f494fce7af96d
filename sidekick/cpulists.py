"""Lists of processors, and one value for each of them, as short text that can be read back.

`0-3,8` is the kernel's own form of a list (Documentation/admin-guide/cputopology.rst). Values that
differ are written `0-3=powersave,8=performance`; one value that all have is written alone. So a
setting of 500 processors is one line in a plan, and undo still knows each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CPUS = "/sys/devices/system/cpu"
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`, sorted. Raises `ValueError`."""
    found: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = _RANGE.fullmatch(part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part!r} is not a processor or a range of them")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def text(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def joined(values: Mapping[int, str]) -> str:
    """Return the values of some processors as one text."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[int]] = {}
    for cpu, value in sorted(values.items()):
        by_value.setdefault(value, []).append(cpu)
    return " ".join(f"{text(cpus)}={value}" for value, cpus in by_value.items())


def parted(joined_values: str, cpus: Iterable[int]) -> dict[int, str]:
    """Return the value of each of these processors; those that the text leaves out have none."""
    if "=" not in joined_values:
        return dict.fromkeys(cpus, joined_values)
    wanted = set(cpus)
    values = {}
    for part in joined_values.split():
        names, _, value = part.partition("=")
        values.update({cpu: value for cpu in numbers(names) if cpu in wanted})
    return values


def chosen(choices: str) -> str:
    """Return the choice in force of an attribute that lists all: `always [madvise] never`."""
    found = re.search(r"\[([^\]]+)\]", choices)
    return found[1] if found else choices
