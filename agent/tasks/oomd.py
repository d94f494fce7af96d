"""Finds out which tasks systemd-oomd killed; see `tasks.core.oomd`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from agent.machine import Processes, UnitState
from agent.tasks.core.lifecycle import ObservedUnit
from agent.tasks.core.oomd import (
    end_log_command,
    kill_log_command,
    killed,
    may_be_oomd,
    with_oomd_end,
)
from agent.tasks.unit import observed_unit
from wire.errors import TwineError

log = logging.getLogger(__name__)

_SYNC = ("journalctl", "--sync")
"""Returns once journald has stored all earlier messages."""
_JOURNAL_TIMEOUT_S = 10.0


class Oomd:
    """Reads the host's journal, but only after an end for lack of memory."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    async def observed(self, unit: UnitState, counted_invocation: str) -> ObservedUnit:
        """Return the state of a unit. The end of `counted_invocation` is already recorded."""
        observed = observed_unit(unit)
        if not may_be_oomd(observed) or observed.invocation_id == counted_invocation:
            return observed
        return with_oomd_end(
            observed, unit.unit, await self._read_log(end_log_command(observed, time.time()))
        )

    async def recently_killed(self, within_s: float) -> list[str]:
        """Return the tasks' cgroups that systemd-oomd killed in the last `within_s` seconds."""
        return sorted(killed(await self._read_log(kill_log_command(time.time(), within_s))))

    async def _read_log(self, command: Sequence[str]) -> str:
        """Return the output of a command that reads the journal; empty and logged if it fails."""
        try:
            return await asyncio.to_thread(self._run, command)
        except TwineError as e:
            log.warning("cannot read the actions of systemd-oomd", extra={"why": str(e)})
            return ""

    def _run(self, command: Sequence[str]) -> str:
        self._processes.run(_SYNC, timeout_s=_JOURNAL_TIMEOUT_S, check=False)
        return self._processes.run(command, timeout_s=_JOURNAL_TIMEOUT_S).stdout
