"""What a store says of itself while it moves to another engine, and afterwards (docs/adr/0158).

A control plane never opens a store with a note: the copy is not complete, or another engine has it.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import NoReturn

import msgspec

from wire.errors import ConfigError


class MigrationState(StrEnum):
    """How far a store is."""

    INCOMING = "incoming"
    """Records are copied into it."""
    PROVED = "proved"
    """All records were read back; the store that they come from still counts."""
    MOVED = "moved"
    """Another engine has its records; this store never counts again by itself."""


class MigrationNote(msgspec.Struct, frozen=True):
    """The note in a store's metadata."""

    run: int
    """Random number of the migration, the same in both stores; below 2^62."""
    state: MigrationState
    at: int
    """Seconds since 1970."""


def refuse(store: str, note: MigrationNote) -> NoReturn:
    """Raise `ConfigError` for a control plane that would open a store with a note."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(note.at))
    if note.state is MigrationState.MOVED:
        raise ConfigError(
            f"cannot open the store in {store}: it was moved to another engine at {at}",
            hint="configure that engine, or move back: twine-control-plane migrate-store",
        )
    raise ConfigError(
        f"cannot open the store in {store}: a migration into it, begun at {at}, is not complete",
        hint="run the same twine-control-plane migrate-store again",
    )
