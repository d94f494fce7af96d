"""An entry of a boot loader, and the interface of all loaders."""

from __future__ import annotations

from typing import Protocol

import msgspec

from sidekick.setting import Host
from wire.errors import HostError


class Entry(msgspec.Struct, frozen=True):
    """One boot entry."""

    line: str
    """The whole kernel command line."""
    version: str = ""
    """Version of the kernel; empty for the kernel of the loader's own default."""
    default: bool = False
    """Whether the host boots it by default: only after a healthy boot with it."""


def check_staged(loader: Loader, host: Host, entry: Entry, path: str) -> None:
    """Raise `HostError` unless a loader reads back the entry that it wrote to `path`."""
    if loader.read(host) != entry:
        raise HostError(
            f"cannot stage the command line in {path}: its content differs after the write"
        )


class Loader(Protocol):
    """A boot loader. `stage` and `clear` also work after a crash of an earlier call."""

    @property
    def name(self) -> str:
        """The name of the loader in reports."""

    def is_present(self, host: Host) -> bool:
        """Return whether this host boots with it, and it can hold an entry of sidekick."""

    def own_line(self, host: Host) -> str | None:
        """Return the host's own line, None if only the running kernel has it."""

    def read(self, host: Host) -> Entry | None:
        """Return sidekick's entry as the loader would boot it, None if there is none."""

    def as_read_back(self, host: Host, entry: Entry) -> Entry:
        """Return the entry as `read` returns it after `stage`.

        Raises `HostError` if the loader cannot hold the entry.
        """

    def stage(self, host: Host, entry: Entry) -> str:
        """Store `entry` as sidekick's entry, and return where. Raises `HostError`."""

    def clear(self, host: Host) -> None:
        """Remove sidekick's entry. Raises `HostError`."""

    def why_no_boot_once(self, host: Host) -> str:
        """Return why the loader cannot boot our entry just once, "" if it can."""

    def boot_once(self, host: Host) -> None:
        """Select our entry for the next boot only. Raises `HostError`."""
