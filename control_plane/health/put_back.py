"""Hosts that were told more than our store knows: an old copy was put back (docs/adr/0111)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sized

from agent.errors import ConfigError
from control_plane.health.core.put_back import is_put_back

log = logging.getLogger(__name__)

HINT = (
    "nothing was stopped or moved there. Put the newest store back; or, if it is lost:"
    " twine-control-plane restore-store --from COPY (docs/operating.md)"
)


class PutBack:
    """Counts the hosts that refuse this control plane for the age of its store."""

    def __init__(self, followed: Sized) -> None:
        """Take the machines that are asked at all."""
        self._followed = followed
        self._refusing: dict[str, str] = {}
        self._found: asyncio.Event = asyncio.Event()
        self.all_are_asked = False
        """Before that a few of many would be a majority."""

    def words(self) -> str:
        """Return what is known, for people; empty: no host says that our store is old."""
        if not self._refusing:
            return ""
        name, why = next(iter(sorted(self._refusing.items())))
        count = f"{len(self._refusing)} of {len(self._followed)} hosts"
        return f"the store is older than what {count} were told ({name}: {why})"

    def refused(self, machine: str, why: str) -> None:
        """Take in that a host refuses us."""
        if machine not in self._refusing:
            log.error("the store is older than a host", extra={"machine": machine, "reason": why})
        self._refusing[machine] = why
        self.look()

    def taken(self, machine: str) -> None:
        """Take in that a host answers us, or is followed no more."""
        self._refusing.pop(machine, None)

    def look(self) -> None:
        """Find out whether enough hosts say so."""
        if self.all_are_asked and is_put_back(len(self._refusing), len(self._followed)):
            self._found.set()

    async def wait(self) -> None:
        """Return never, or raise `ConfigError` once most hosts know of a newer store."""
        await self._found.wait()
        raise ConfigError(self.words(), hint=HINT)
