"""Finds out what systemd-oomd did to tasks; see `tasks.core.oomd`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from agent.machine import Processes, UnitState
from agent.tasks.core.lifecycle import SeenUnit
from agent.tasks.core.oomd import is_unclear, killed, told_apart, what_ended, what_was_done
from agent.tasks.unit import seen_unit
from wire.errors import TwineError

log = logging.getLogger(__name__)

_SYNC = ("journalctl", "--sync")
"""Returns once journald has taken in all that was said before."""
_PATIENCE_S = 10.0


class Oomd:
    """Asks the host's journal, and only where memory was short."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def seen(self, unit: UnitState, counted: str) -> SeenUnit:
        """Return what is seen of a unit; the end of the invocation `counted` is known already."""
        seen = seen_unit(unit)
        if not is_unclear(seen) or seen.invocation_id == counted:
            return seen
        return told_apart(seen, unit.unit, await self._said(what_ended(seen, time.time())))

    async def killed_lately(self, within_s: float) -> list[str]:
        """Return the cgroups below the slice of all tasks that it killed in the last seconds."""
        return sorted(killed(await self._said(what_was_done(time.time(), within_s))))

    async def _said(self, command: Sequence[str]) -> str:
        """Return what the journal has; nothing where it cannot be read, which is logged."""
        try:
            return await asyncio.to_thread(self._ask, command)
        except TwineError as e:
            log.warning("cannot read the actions of systemd-oomd", extra={"why": str(e)})
            return ""

    def _ask(self, command: Sequence[str]) -> str:
        self._processes.run(_SYNC, timeout_s=_PATIENCE_S, check=False)
        return self._processes.run(command, timeout_s=_PATIENCE_S).stdout
