"""What a boot loader holds for us, and what every loader can do."""

from __future__ import annotations

from typing import Protocol

import msgspec

from sidekick.setting import Host


class Entry(msgspec.Struct, frozen=True):
    """One thing to boot."""

    line: str
    """The kernel command line, whole."""
    version: str = ""
    """Of the kernel; empty for the one that the loader's own default boots."""
    default: bool = False
    """Whether the host boots it by default: only after a healthy boot with it."""


class Loader(Protocol):
    """A boot loader. `stage` and `clear` lead there from wherever a crash left its files."""

    @property
    def name(self) -> str:
        """What the loader is called in reports."""

    def is_there(self, host: Host) -> bool:
        """Return whether this host boots through it, and it can take an entry of ours."""

    def own_line(self, host: Host) -> str | None:
        """Return the host's own line, None where only the running kernel has it."""

    def read(self, host: Host) -> Entry | None:
        """Return our entry as the loader would boot it, None where there is nothing of ours."""

    def kept(self, host: Host, entry: Entry) -> Entry:
        """Return what `read` gives after `stage`: a loader without defaults keeps none.

        Raises `HostError` where the loader cannot hold the entry.
        """

    def stage(self, host: Host, entry: Entry) -> str:
        """Make `entry` our entry, and say where it lies. Raises `HostError`."""

    def clear(self, host: Host) -> None:
        """Leave nothing of ours. Raises `HostError`."""

    def why_not_once(self, host: Host) -> str:
        """Return why the loader cannot boot our entry just once, "" if it can."""

    def boot_once(self, host: Host) -> None:
        """Select our entry for the next boot only. Raises `HostError`."""
