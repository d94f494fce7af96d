"""Detects that the store is an old copy: hosts have newer commands than it (docs/adr/0111)."""

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
        self._is_old, self._settled = asyncio.Event(), False
        self.all_are_called = False
        """Whether all hosts were called. Before, a few of them could look like a majority."""

    def describe(self) -> str:
        """Describe how many hosts know a newer revision; empty: none does."""
        if not self._refusing:
            return ""
        name = min(self._refusing)
        count = f"{len(self._refusing)} of {len(self._followed)} hosts"
        return (
            f"the store is older than the revision that {count} know ({name}: "
            f"{self._refusing[name]})"
        )

    def record_refusal(self, machine: str, why: str) -> None:
        """Record that a host refuses this control plane because of its old store."""
        if machine not in self._refusing:
            log.error("the store is older than a host", extra={"machine": machine, "reason": why})
        self._refusing[machine] = why
        self._answered.discard(machine)
        self.check()

    def record_answer(self, machine: str) -> None:
        """Record that a host accepts this control plane."""
        self._refusing.pop(machine, None)
        self._answered.add(machine)

    def forget(self, machine: str) -> None:
        """Forget a machine that is no longer followed."""
        self._refusing.pop(machine, None)
        self._answered.discard(machine)

    def check(self) -> None:
        """Check whether enough hosts report a newer store, and wake `wait`."""
        counts = len(self._refusing), len(self._answered), len(self._followed)
        if self.all_are_called and is_restored(*counts, settled=self._settled):
            self._is_old.set()

    async def wait(self) -> None:
        """Never return; raise `ConfigError` once most hosts report a newer store."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLES_S):
                await self._is_old.wait()
        self._settled = True
        self.check()
        await self._is_old.wait()
        raise ConfigError(self.describe(), hint=HINT)
