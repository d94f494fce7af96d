"""Brings each assigned machine to its entitlement's host profile, and proves it.

One loop per assigned machine; `core.profile_switch` decides each step from the record and
from what the agent says.
"""

from __future__ import annotations

import asyncio
import logging

from agent.api import TaskState
from agent.errors import TwineError
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.core.profile_switch import Step, Switch, next_step
from control_plane.core.unavailability import open_event
from control_plane.services.dispatcher import Dispatcher
from control_plane.services.fleet import Sight
from control_plane.services.region import Region
from control_plane.services.table import ignore

log = logging.getLogger(__name__)
_ASK_EVERY_S = 1.0
_REFUSALS_MAX = 5
"""Refusals of a profile by an agent that answers, before the machine is put aside."""


class Switcher:
    """Owner of nothing: it moves machines towards what their records want."""

    def __init__(
        self,
        region: Region,
        dispatcher: Dispatcher,
    ) -> None:
        """Do nothing yet."""
        self._broker, self._fleet = region.broker, region.fleet
        self._settings, self._clock = region.settings, region.clock
        self._dispatcher = dispatcher
        self._group: asyncio.TaskGroup | None = None
        self._wakes: dict[str, asyncio.Event] = {}
        self._raised_at: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        region.broker.listen(lambda name, *_: self._wake(name), loaded=ignore)
        region.fleet.listen(self._wake)

    async def run(self) -> None:
        """Switch machines until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._broker.table:
                    self._wake(name)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # news may still come while everything ends

    def _wake(self, name: str) -> None:
        if name in self._wakes:
            self._wakes[name].set()
            return
        record = self._broker.table.find(name)
        if self._group is not None and record is not None and record.entitlement:
            self._wakes[name] = asyncio.Event()
            self._wakes[name].set()
            self._group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        """Look after one machine for as long as it is assigned."""
        wake = self._wakes[name]
        pause: float | None = None
        while (record := self._broker.table.find(name)) is not None and record.entitlement:
            try:
                async with asyncio.timeout(pause):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            try:
                pause = await self._step(self._broker.table.get(name))
            except TwineError as e:
                log.warning("switch failed", extra={"machine": name, "reason": str(e)})
                pause = self._settings.retry_s
            except Exception:
                log.exception("switch failed", extra={"machine": name})
                pause = self._settings.retry_s
        del self._wakes[name]

    async def _step(self, record: MachineRecord) -> float | None:
        """Do the next thing for one machine; return when to look again, None: when woken."""
        name, sight = record.machine, self._fleet.sight(record.machine)
        if record.state is not MachineState.UP or not sight.answering:
            return await self._overdue(record)
        switch = next_step(record, sight.profile, empty=_empty(sight))
        match switch.step:
            case Step.SEND:
                return await self._send(record, sight)
            case Step.RAISE:
                return await self._raise(record, sight, switch)
            case Step.RECORD:
                await self._broker.profile_seen(name, sight.profile)
                self._fleet.changed(name)
                log.info(
                    "profile verified",
                    extra={"machine": name, "profile": record.profile_wanted},
                )
            case Step.QUARANTINE:
                await self._quarantine(record, switch.reason)
            case Step.WAIT | Step.WAIT_REBOOT:
                return await self._wait(record, sight, switch)
            case Step.NOTHING:
                pass
        return None

    async def _send(self, record: MachineRecord, sight: Sight) -> float | None:
        refusal = sight.refused.get("profile")
        if refusal and self._too_often(record.machine):
            await self._quarantine(record, refusal)
            return None
        self._dispatcher.put_profile(record.machine, allow_reboot=_empty(sight))
        return self._settings.retry_s

    async def _raise(self, record: MachineRecord, sight: Sight, switch: Switch) -> float | None:
        """Ask again as a new request, but not more often than every retry pause."""
        now = asyncio.get_running_loop().time()
        last = self._raised_at.get(record.machine)
        if last is not None and now - last < self._settings.retry_s:
            return self._settings.retry_s
        self._raised_at[record.machine] = now
        log.info(
            "profile asked for again",
            extra={"machine": record.machine, "reason": switch.reason},
        )
        await self._broker.raise_generation(record.machine, sight.profile.generation)
        return 0.0

    async def _wait(self, record: MachineRecord, sight: Sight, switch: Switch) -> float | None:
        name = record.machine
        if (sight.profile.state, sight.profile.detail) != (
            record.profile_state,
            record.profile_detail,
        ):
            await self._broker.profile_seen(name, sight.profile)
        if switch.step is Step.WAIT_REBOOT:
            deadline = self._clock() + self._settings.reboot_grace_s
            await self._broker.expect_reboot(name, switch.reason, deadline)
            if await self._overdue(self._broker.table.get(name)) is None:
                return None
        await self._dispatcher.refresh_profile(name)
        return _ASK_EVERY_S

    async def _overdue(self, record: MachineRecord) -> float | None:
        """End the wait for a reboot whose deadline passed; return the time that is left."""
        planned = open_event(record, EventKind.PLANNED)
        if planned is None or planned.deadline is None:
            return None
        left = planned.deadline - self._clock()
        if left > 0:
            return left
        await self._quarantine(record, f"it did not come back in time: {planned.reason}")
        return None

    async def _quarantine(self, record: MachineRecord, reason: str) -> None:
        """Put a machine aside; one on which tasks run stays, but takes no more of them."""
        sight = self._fleet.sight(record.machine)
        if sight.answering and not _empty(sight):
            if record.profile_state is not sight.profile.state:
                await self._broker.profile_seen(record.machine, sight.profile)
            return
        until = self._clock() + self._settings.quarantine_s
        self._refusals.pop(record.machine, None)
        await self._broker.quarantine(record.machine, reason, until)
        self._fleet.changed(record.machine)

    def _too_often(self, name: str) -> bool:
        self._refusals[name] = self._refusals.get(name, 0) + 1
        return self._refusals[name] >= _REFUSALS_MAX


def _empty(sight: Sight) -> bool:
    """Return whether no task is alive there, so that the machine may be rebooted."""
    return all(s.state in (TaskState.STOPPED, TaskState.FAILED) for s in sight.tasks.values())
