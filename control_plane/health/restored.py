"""Finds hosts with newer commands than our store, which then is an old copy (docs/adr/0111)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sized
from contextlib import suppress

from control_plane.health.core.verdict import is_restored
from wire.errors import ConfigError

log = logging.getLogger(__name__)

HINT = (
    "no task was stopped or moved on these hosts. Restore the newest store; or, if it is lost: "
    "twine-control-plane restore-store --from COPY (docs/operating.md)"
)


SETTLES_S = 60.0
"""Hosts that have not answered this long after a start are no longer waited for."""


class RestoredHosts:
    """Counts the hosts that refuse this control plane because its store is old."""

    def __init__(self, followed: Sized) -> None:
        """`followed` are the machines that this process follows."""
        self._followed = followed
        self._refusing: dict[str, str] = {}
        self._answered: set[str] = set()
        self._found, self._settled = asyncio.Event(), False
        self.all_are_asked = False
        """Until all are called, a few of the followed hosts would be a majority."""

    def words(self) -> str:
        """Return how many hosts know a newer revision; empty if none does."""
        if not self._refusing:
            return ""
        name = min(self._refusing)
        count = f"{len(self._refusing)} of {len(self._followed)} hosts"
        return (
            f"the store is older than the revision that {count} know ({name}: "
            f"{self._refusing[name]})"
        )

    def refused(self, machine: str, why: str) -> None:
        """Record that a host refuses us."""
        if machine not in self._refusing:
            log.error("the store is older than a host", extra={"machine": machine, "reason": why})
        self._refusing[machine] = why
        self._answered.discard(machine)
        self.look()

    def answered(self, machine: str) -> None:
        """Record that a host accepts us."""
        self._refusing.pop(machine, None)
        self._answered.add(machine)

    def gone(self, machine: str) -> None:
        """Forget a machine that is no longer followed."""
        self._refusing.pop(machine, None)
        self._answered.discard(machine)

    def look(self) -> None:
        """Check whether enough hosts report a newer store."""
        counts = len(self._refusing), len(self._answered), len(self._followed)
        if self.all_are_asked and is_restored(*counts, settled=self._settled):
            self._found.set()

    async def wait(self) -> None:
        """Never return; raise `ConfigError` once most hosts report a newer store."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLES_S):
                await self._found.wait()
        self._settled = True
        self.look()
        await self._found.wait()
        raise ConfigError(self.words(), hint=HINT)
