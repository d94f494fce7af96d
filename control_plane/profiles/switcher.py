"""Brings each assigned machine to its entitlement's host profile, and records the verification.

A keyed worker handles each assigned machine. `core/switch.py` decides each step from the machine's
record and its agent's report.
"""

from __future__ import annotations

import logging

from control_plane.agents.core.observed import is_empty
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.observations import PROFILE, Observation
from control_plane.agents.region import Region
from control_plane.api.limits import LimitName
from control_plane.api.machine_commands import (
    ExpectReboot,
    NoteProfile,
    QuarantineMachine,
    RaiseGeneration,
)
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.broker.core.unavailability import open_event
from control_plane.profiles.core.switch import Step, Switch, next_step
from control_plane.runtime.table import ignore
from control_plane.runtime.workers import Pace, Workers

log = logging.getLogger(__name__)
_QUERY_EVERY_S = 1.0
_REFUSALS_MAX = 5
"""Consecutive refusals of a profile after which the machine is quarantined."""


class Switcher:
    """Moves machines towards the profiles in their records; owns no records."""

    def __init__(
        self,
        region: Region,
        dispatcher: Dispatcher,
    ) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._settings, self._runtime = region.settings, region.runtime
        self._dispatcher, self._follows = dispatcher, region.follows
        pace = Pace(retry_s=self._settings.retry_s)
        self._workers = Workers(region.runtime, "profiles", self._switch, pace)
        self._limit = region.limits.of(
            LimitName.PROFILES,
            self._settings.profile_switches_per_s,
            self._settings.profile_switches_burst,
        )
        self._requested: dict[str, tuple[str, int]] = {}
        """Machine → profile and generation of the last request; repeats are not rate-limited."""
        self._raised_at: dict[str, float] = {}
        self._requested_empty: dict[str, int] = {}
        """Machine → generation of its profile that was requested while no task was alive there."""
        self._reboot_deadlines: dict[str, tuple[float, float]] = {}
        """Machine → the stored deadline of its reboot, and the same on the monotonic clock."""
        region.broker.listen(lambda name, *_: self._wake(name), loaded=ignore)
        region.observations.listen(self._wake)

    async def run(self) -> None:
        """Switch machines until cancelled."""
        for name in self._broker.table:
            self._wake(name)
            await self._runtime.checkpoint()
        await self._workers.run()

    def _wake(self, name: str) -> None:
        record = self._broker.table.find(name)
        if record is not None and self._is_ours(record):
            self._workers.wake(name)
        else:
            self._forget(name)

    def _is_ours(self, record: MachineRecord) -> bool:
        return bool(record.entitlement) and self._follows(record.entitlement)

    def _forget(self, name: str) -> None:
        self._workers.forget(name)
        for known in (
            self._raised_at,
            self._reboot_deadlines,
            self._requested_empty,
            self._requested,
        ):
            known.pop(name, None)

    async def _switch(self, name: str) -> float | None:
        """Carry out the next step for a machine; forget a machine that is no longer assigned."""
        record = self._broker.table.find(name)
        if record is None or not self._is_ours(record):
            self._forget(name)
            return None
        return await self._take_step(record)

    async def _take_step(self, record: MachineRecord) -> float | None:
        """Carry out the next step; return the seconds to the next one, None: wait for a change."""
        name, observation = record.machine, self._observations.observation(record.machine)
        if record.state is not MachineState.UP or not observation.answering:
            return await self._check_reboot(record)
        empty = is_empty(observation.tasks)
        # not known of requests by an earlier process
        was_empty = self._requested_empty.get(name) == record.assignment_generation
        requested_with_tasks = not was_empty and open_event(record, EventKind.PLANNED) is None
        switch = next_step(
            record, observation.profile, empty=empty, requested_with_tasks=requested_with_tasks
        )
        match switch.step:
            case Step.SEND:
                return await self._send(record, observation)
            case Step.RAISE:
                return await self._raise_generation(record, observation, switch)
            case Step.RECORD:
                await self._broker.carry_out(name, NoteProfile(seen=observation.profile))
                self._observations.changed(name)
                log.info(
                    "profile verified",
                    extra={"machine": name, "profile": record.profile_wanted},
                )
            case Step.QUARANTINE:
                await self._quarantine(record, switch.reason)
            case Step.WAIT | Step.WAIT_REBOOT:
                return await self._wait(record, observation, switch)
            case Step.NOTHING:
                pass
        return None

    async def _send(self, record: MachineRecord, observation: Observation) -> float | None:
        if observation.profile_refusals >= _REFUSALS_MAX:
            await self._quarantine(record, observation.refused[PROFILE])
            return None
        wanted = (record.profile_wanted, record.assignment_generation)
        if self._requested.get(record.machine) != wanted:
            wait_s = self._limit.take(self._runtime.now())
            if wait_s > 0:
                return max(wait_s, _QUERY_EVERY_S)
            self._requested[record.machine] = wanted
        if is_empty(observation.tasks):
            self._requested_empty[record.machine] = record.assignment_generation
        else:
            self._requested_empty.pop(record.machine, None)
        self._dispatcher.put_profile(record.machine)
        return self._settings.retry_s

    async def _raise_generation(
        self, record: MachineRecord, observation: Observation, switch: Switch
    ) -> float | None:
        """Request the profile again under a new generation, at most once per `retry_s`."""
        now = self._runtime.now()
        last = self._raised_at.get(record.machine)
        if last is not None and now - last < self._settings.retry_s:
            return self._settings.retry_s
        self._raised_at[record.machine] = now
        log.info(
            "profile requested again",
            extra={"machine": record.machine, "reason": switch.reason},
        )
        await self._broker.carry_out(
            record.machine, RaiseGeneration(above=observation.profile.generation)
        )
        return 0.0

    async def _wait(
        self, record: MachineRecord, observation: Observation, switch: Switch
    ) -> float | None:
        name = record.machine
        if (observation.profile.state, observation.profile.detail) != (
            record.profile_state,
            record.profile_detail,
        ):
            await self._broker.carry_out(name, NoteProfile(seen=observation.profile))
        if switch.step is Step.WAIT_REBOOT:
            deadline = self._runtime.date() + self._settings.reboot_grace_s
            await self._broker.carry_out(
                name, ExpectReboot(reason=switch.reason, deadline=deadline)
            )
            if await self._check_reboot(self._broker.table.get(name)) is None:
                return None
        self._dispatcher.ask_profile(name)
        return _QUERY_EVERY_S

    async def _check_reboot(self, record: MachineRecord) -> float | None:
        """Return the seconds left for a planned reboot; after that time quarantine the machine."""
        name, planned = record.machine, open_event(record, EventKind.PLANNED)
        if planned is None or planned.deadline is None:
            self._reboot_deadlines.pop(name, None)
            return None
        known = self._reboot_deadlines.get(name)
        if known is None or known[0] != planned.deadline:
            left = max(0.0, planned.deadline - self._runtime.date())
            known = self._reboot_deadlines[name] = (planned.deadline, self._runtime.now() + left)
        left = known[1] - self._runtime.now()  # the wall clock may have stepped since
        if left > 0:
            return left
        await self._quarantine(record, f"it did not come back in time: {planned.reason}")
        return None

    async def _quarantine(self, record: MachineRecord, reason: str) -> None:
        """Quarantine a machine; one with running tasks keeps them, but gets no new ones."""
        observation = self._observations.observation(record.machine)
        if observation.answering and not is_empty(observation.tasks):
            if record.profile_state is not observation.profile.state:
                await self._broker.carry_out(record.machine, NoteProfile(seen=observation.profile))
            return
        until = self._runtime.date() + self._settings.quarantine_s
        observation.forgive_profile()
        await self._broker.carry_out(record.machine, QuarantineMachine(reason=reason, until=until))
        self._observations.changed(record.machine)
