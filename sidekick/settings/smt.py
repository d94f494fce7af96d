"""Simultaneous multithreading: whether cores run two threads each.

It adds and removes processors, so no task may run during the change. Source: Linux,
Documentation/ABI/testing/sysfs-devices-system-cpu (`smt/control`); `forceoff` can only be undone by
a boot and is therefore never written.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from sidekick.cpulists import CPUS
from sidekick.report import Disruption
from sidekick.setting import FileSetting, Host

CONTROL = f"{CPUS}/smt/control"


class Smt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [smt] table."""

    mode: Literal["on", "off"] | None = None
    required: bool = False
    """Whether a host that cannot switch it cannot run the profile."""


class SmtSetting(FileSetting):
    """One switch."""

    kind: ClassVar[str] = "smt"
    section: ClassVar[type[Smt]] = Smt

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return DRAIN: tasks may be pinned to the processors."""
        return Disruption.DRAIN

    def path(self, setting: str) -> str:  # noqa: ARG002
        """Return the switch."""
        return CONTROL

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host has no such switch."""
        return "its cores run one thread only, or firmware or the command line has forced SMT off"

    def read(self, host: Host, setting: str) -> str | None:
        """Return `on` or `off`."""
        mode = super().read(host, setting)
        return mode if mode in ("on", "off") else None
