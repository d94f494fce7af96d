"""Asks every agent what happened, all the time: sign of life and news in one long poll.

An agent that does not answer is asked again every second; `core.health` decides when its
machine counts as down. On each (re)connection everything is listed before anything is
concluded, so a machine that was away is compared with the records as it is now.
"""

from __future__ import annotations

import asyncio
import logging

from agent.api import Event, Events, ProfileState
from agent.errors import Refused, TwineError
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.core.health import BrakePolicy, Signs, judge
from control_plane.core.unavailability import open_event
from control_plane.services.agents import AgentApi, AgentPool
from control_plane.services.region import Region
from control_plane.services.table import ignore

log = logging.getLogger(__name__)
_JUDGE_EVERY_S = 0.5
_SWITCHING = (ProfileState.APPLYING, ProfileState.PENDING_REBOOT)
_MIN_POLL_S = 0.1
"""Between two polls that brought nothing: no busy loop against an agent that does not wait."""


class HealthChecker:
    """Keeps the fleet's sights fresh and the broker's unavailability events true."""

    def __init__(
        self,
        region: Region,
        pool: AgentPool,
    ) -> None:
        """Ask nobody yet."""
        self.brake = ""
        """Why machines that are silent are not declared down; empty: the brake is off."""
        self._broker, self._fleet = region.broker, region.fleet
        self._settings, self._clock = region.settings, region.clock
        self._pool = pool
        self._group: asyncio.TaskGroup | None = None
        self._followed: set[str] = set()
        region.broker.listen(lambda name, *_: self._follow_soon(name), loaded=ignore)

    async def run(self) -> None:
        """Follow all machines until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._broker.table:
                    self._follow_soon(name)
                while True:
                    await asyncio.sleep(_JUDGE_EVERY_S)
                    await self._judge()
            finally:
                self._group = None  # news may still come while everything ends

    def _follow_soon(self, name: str) -> None:
        record = self._broker.table.find(name)
        joined = record is not None and record.facts is not None
        if self._group is not None and joined and name not in self._followed:
            self._followed.add(name)
            self._fleet.sight(name)
            self._group.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        """Talk to one agent for as long as its machine exists."""
        while (record := self._broker.table.find(name)) is not None:
            try:
                await self._converse(name, await self._pool.get(record))
            except (TwineError, TimeoutError) as e:
                self._fleet.silent(name, refused=isinstance(e, Refused))
                log.debug("agent does not answer", extra={"machine": name, "reason": str(e)})
                await asyncio.sleep(self._settings.poll_retry_s)
            except Exception:
                self._fleet.silent(name)
                log.exception("polling failed", extra={"machine": name})
                await asyncio.sleep(self._settings.poll_retry_s)
        self._followed.discard(name)

    async def _converse(self, name: str, agent: AgentApi) -> None:
        """List everything, then follow events until they are lost or the record moved."""
        record = self._broker.table.get(name)
        after, boot_id = await self._list(name, agent)
        if record.state is MachineState.DOWN:
            await self._broker.mark_up(name)
            self._fleet.changed(name)
        loop = asyncio.get_running_loop()
        while self._broker.table.get(name).address == record.address:
            asked = loop.time()
            async with asyncio.timeout(self._patience_s()):
                events = await agent.get_events(after, self._settings.poll_wait_s)
            self._fleet.heard(name)
            if events.lost or events.boot_id not in ("", boot_id):
                return
            if self._fleet.sight(name).doubtful:
                return
            await self._take_in(name, agent, events)
            after = events.latest
            if not events.events and loop.time() - asked < _MIN_POLL_S:
                await asyncio.sleep(_MIN_POLL_S)

    async def _list(self, name: str, agent: AgentApi) -> tuple[int, str]:
        """Ask for everything; return where the events go on, and the boot it is true for.

        The position is taken first: events that happen meanwhile are seen twice, not never.
        """
        async with asyncio.timeout(self._patience_s()):
            facts = await agent.get_machine()
        async with asyncio.timeout(self._settings.call_timeout_s):
            latest = (await agent.get_events(0, 0.0)).latest
            tasks = await agent.list_tasks()
            profile = await agent.get_profile()
            images = await agent.list_images()
        if facts != self._broker.table.get(name).facts:
            await self._broker.facts_seen(name, facts)
        self._fleet.listed(name, facts, tasks.tasks, profile, (i.digest for i in images.images))
        return latest, facts.boot_id

    async def _take_in(self, name: str, agent: AgentApi, events: Events) -> None:
        """Bring the sight up to date: from the events, or by asking where they only hint."""
        kinds = {event.kind for event in events.events}
        async with asyncio.timeout(self._settings.call_timeout_s):
            if "image" in kinds:
                images = await agent.list_images()
                self._fleet.sight(name).images = frozenset(i.digest for i in images.images)
            if "profile" in kinds:
                self._fleet.saw_profile(name, await agent.get_profile())
            if "task-removed" in kinds or any(_bare(event) for event in events.events):
                self._fleet.saw_tasks(name, (await agent.list_tasks()).tasks)
                return
        for event in events.events:
            if event.task is not None:
                self._fleet.saw_task(name, event.task)

    def _patience_s(self) -> float:
        """Return how long a poll may take; short enough to try again before the verdict."""
        return self._settings.poll_wait_s + max(1.0, self._settings.down_after_s / 4)

    async def _judge(self) -> None:
        """Declare machines down that were silent for too long, unless the brake is on."""
        settings = self._settings
        policy = BrakePolicy(
            down_after_s=settings.down_after_s,
            share=settings.brake_share,
            window_s=settings.brake_window_s,
            grace_s=settings.partition_grace_s,
        )
        now = asyncio.get_running_loop().time()
        joined = (r for r in self._broker.table.records() if r.facts is not None)
        signs = {r.machine: self._signs(r, now) for r in joined}
        verdict = judge(signs, policy)
        if verdict.reason != self.brake:
            self.brake = verdict.reason
            if verdict.reason:
                log.warning(
                    "brake on: many machines silent at once",
                    extra={"machines": list(verdict.suspect), "reason": verdict.reason},
                )
        for name in verdict.down:
            silent_s = signs[name].silent_s
            await self._broker.mark_down(name, f"its agent did not answer for {silent_s:.0f} s")
            self._fleet.changed(name)

    def _signs(self, record: MachineRecord, now: float) -> Signs:
        wall = self._clock()
        failure = open_event(record, EventKind.FAILURE)
        planned = open_event(record, EventKind.PLANNED)
        down = record.state is MachineState.DOWN
        silent_s = self._fleet.sight(record.machine).silent_s(now)
        # a switch may reboot the machine before anyone reads that it is going to
        graced = bool(record.entitlement) and silent_s < self._settings.reboot_grace_s
        expected = planned is not None and (planned.deadline is None or wall < planned.deadline)
        return Signs(
            silent_s=silent_s,
            down_for_s=wall - failure.start if down and failure else (0.0 if down else None),
            excused=expected
            or (graced and record.profile_state in _SWITCHING)
            or wall - record.joined_at < self._settings.join_grace_s
            or self._only_the_agent(record.machine, silent_s, now),
        )

    def _only_the_agent(self, machine: str, silent_s: float, now: float) -> bool:
        """Return whether the host lives and its agent may be back in a moment.

        An agent that is killed, upgraded or restarted leaves its tasks running; moving them
        would be the only harm done (P1).
        """
        refused_at = self._fleet.sight(machine).refused_at
        lately = refused_at is not None and now - refused_at < self._settings.down_after_s / 2
        return lately and silent_s < self._settings.agent_grace_s


def _bare(event: Event) -> bool:
    return event.kind == "task" and event.task is None
