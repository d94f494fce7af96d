"""What each kind of setting can do, and what it gets to do it with.

`check`, `wanted`, `plan` and `verify` are pure; `observe` reads; `apply` and `undo` write
one change and read it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agent.errors import FieldError
from sidekick.report import Change, Outcome, SettingReport, Wanted

if TYPE_CHECKING:
    from agent.machine import Hardware, Processes
    from agent.machine.kernelfs import KernelFs
    from sidekick.profile import Profile
    from sidekick.state import Disk

Observed = Mapping[str, str | None]
"""What was read, by setting; None where this host has no such thing."""


@dataclass(frozen=True, slots=True)
class Host:
    """Everything outside: the kernel's files, programs, disk and clocks."""

    fs: KernelFs
    processes: Processes
    disk: Disk
    hardware: Hardware
    now: Callable[[], float]
    """Seconds since 1970."""
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of one change, after reading it back."""

    outcome: Outcome
    actual: str
    detail: str = ""


class Setting(Protocol):
    """One kind of setting. `kind` is its section of a profile and prefix of its names."""

    @property
    def kind(self) -> str:
        """The first part of its settings' names."""

    def check(self, profile: Profile) -> list[FieldError]:
        """Return everything that is wrong with the section, on any host."""

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:
        """Return what the profile asks of this host. Raises `Unprocessable` if that is
        more than the host can give.
        """

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the values in force of these settings and of those that they change too."""

    def plan(
        self, wanted: Sequence[Wanted], observed: Observed, originals: Observed
    ) -> list[Change]:
        """Return the writes that lead from `observed` to `wanted`, in order.

        What an earlier profile changed and this one does not want goes back to its
        original; nothing else is touched.
        """

    def apply(self, host: Host, change: Change) -> Applied:
        """Write one change and say what was read back. Raises `HostError`."""

    def verify(self, wanted: Wanted, observed: Observed) -> SettingReport:
        """Say how one wanted value stands."""

    def undo(self, host: Host, change: Change) -> None:
        """Bring back what was before one change. Raises `HostError` where that is not so."""


def kind_of(setting: str) -> str:
    """Return the kind that a setting's name begins with."""
    return setting.partition(".")[0]
