"""Lists of processors, and one value for each of them, as short text that can be read back.

`0-3,8` is the kernel's own form of a list (Documentation/admin-guide/cputopology.rst). Values that
differ are written `0-3=powersave,8=performance`; one value that all have is written alone. So a
setting of 500 processors is one line in a plan, and undo still has each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from wire.cpus import cpu_list_text, parse_cpu_list

__all__ = [
    "CPUS",
    "active_choice",
    "cpu_list_text",
    "join_values",
    "parse_cpu_list",
    "split_values",
]

CPUS = "/sys/devices/system/cpu"


def join_values(values: Mapping[int, str]) -> str:
    """Return the values of some processors as one text."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[int]] = {}
    for cpu, value in sorted(values.items()):
        by_value.setdefault(value, []).append(cpu)
    return " ".join(f"{cpu_list_text(cpus)}={value}" for value, cpus in by_value.items())


def split_values(text_of_values: str, cpus: Iterable[int]) -> dict[int, str]:
    """Return the value of each of these processors; those that the text leaves out have none."""
    if "=" not in text_of_values:
        return dict.fromkeys(cpus, text_of_values)
    wanted = set(cpus)
    values = {}
    for part in text_of_values.split():
        names, _, value = part.partition("=")
        values.update({cpu: value for cpu in parse_cpu_list(names) if cpu in wanted})
    return values


def active_choice(choices: str) -> str:
    """Return the choice in force of an attribute that lists all: `always [madvise] never`."""
    found = re.search(r"\[([^\]]+)\]", choices)
    return found[1] if found else choices
