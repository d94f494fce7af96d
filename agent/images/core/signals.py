"""Signals of Linux by name, as numbers: those that a program may be stopped with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NAMES = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV"),
    *("USR2", "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN"),
    *("TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"),
)
SIGNALS: Mapping[str, int] = MappingProxyType(
    {f"SIG{name}": number for number, name in enumerate(_NAMES, start=1)}
    | {f"SIGRTMIN+{n}": 34 + n for n in range(16)}
)
"""Numbers of signal(7) for x86 and arm; SIGRTMIN is 34 in glibc, which keeps two to itself."""
