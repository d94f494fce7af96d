"""The note in a store during and after its migration to another engine (docs/adr/0158).

A control plane never opens a store with a note: it is incomplete, or another engine has its
records.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import NoReturn

import msgspec

from wire.errors import ConfigError


class MigrationState(StrEnum):
    """Progress of a store's migration."""

    INCOMING = "incoming"
    """Records are copied into it."""
    PROVED = "proved"
    """All records were read back; their source is still in use."""
    MOVED = "moved"
    """Another engine has its records; this store is not used again by itself."""


class MigrationNote(msgspec.Struct, frozen=True):
    """The note in a store's metadata."""

    run: int
    """Random number of the migration, the same in both stores; below 2^62."""
    state: MigrationState
    at: int
    """Seconds since 1970."""


def refuse_noted_store(store: str, note: MigrationNote) -> NoReturn:
    """Raise `ConfigError` for a control plane that would open a store with a note."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(note.at))
    if note.state is MigrationState.MOVED:
        raise ConfigError(
            f"cannot open the store in {store}: it was moved to another engine at {at}",
            hint="configure that engine, or move back: twine-control-plane migrate-store",
        )
    raise ConfigError(
        f"cannot open the store in {store}: a migration into it, begun at {at}, is incomplete",
        hint="run the same twine-control-plane migrate-store again",
    )
