"""Follows every agent: lists its state, then reads its events.

On each connection the follower lists everything first, so it also learns what changed while the
machine was away. An agent that does not answer is called again every second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agent.api import Event, Events, MachineFacts
from control_plane.agents.polled import CONNECT_S
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentApi, EventStream
from control_plane.agents.region import Region
from control_plane.api.machine_commands import NoteFacts
from control_plane.api.machines import MachineRecord
from control_plane.health.restored import RestoredHosts
from control_plane.runtime.table import ignore
from wire.errors import Conflict, NotFound, OlderStore, Refused, TwineError, Unreachable

log = logging.getLogger(__name__)
_TRIES = 2
"""Attempts of one call before the connection is started again."""
T = TypeVar("T")


class _StoreFailed(Exception):
    """The agent answered, but its report could not be stored."""


class Follower:
    """Keeps the observations of all machines fresh."""

    def __init__(self, region: Region, pool: AgentPool) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._settings, self._runtime = region.settings, region.runtime
        self._is_second, self._calls_agent = region.is_second, region.calls
        self._pool = pool
        self._group: asyncio.TaskGroup | None = None
        self._followed: set[str] = set()
        self.restored = RestoredHosts(self._followed)
        self._waits: dict[str, asyncio.Timeout] = {}
        """Timeouts of waiting polls by machine; one that is rescheduled to now ends its poll."""
        region.broker.listen(self._record_changed, loaded=ignore)
        region.observations.listen(self._observation_changed)

    async def run(self) -> None:
        """Follow all machines that have joined, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._broker.table:
                    self._start_following(name)
                    await self._runtime.checkpoint()
                self.restored.all_are_called = True
                self.restored.check()
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # changes may still arrive during the shutdown

    def _record_changed(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        self.update_following(name)
        if before is not None and (after is None or after.address != before.address):
            self._end_poll(name)

    def update_following(self, name: str) -> None:
        """Start or stop following a machine, if its address or its shard changed."""
        self._start_following(name)
        if name in self._followed and self._own_record(name) is None:
            self._end_poll(name)

    def _own_record(self, name: str) -> MachineRecord | None:
        """Return the record of a machine that this process must follow; None: it must not."""
        record = self._broker.table.find(name)
        return record if record is not None and self._calls_agent(record) else None

    def _observation_changed(self, name: str) -> None:
        if self._observations.observation(name).doubtful:
            self._end_poll(name)

    def _end_poll(self, name: str) -> None:
        wait = self._waits.get(name)
        if wait is not None and not wait.expired():
            wait.reschedule(0.0)

    def _start_following(self, name: str) -> None:
        record = self._own_record(name)
        joined = record is not None and record.facts is not None
        if self._group is not None and joined and name not in self._followed:
            self._followed.add(name)
            self._observations.observation(name)
            self._runtime.spawn_in(self._group, "following", self._follow(name))

    async def _follow(self, name: str) -> None:
        """Call one agent while its machine exists and this process must follow it."""
        try:
            while (record := self._own_record(name)) is not None:
                await self._runtime.checkpoint()  # after a start all agents are called at once
                self._observations.asked(name)
                failed = await self._attempt(name, record)
                if failed:  # many may fail together: spread the retries over time
                    jitter = self._runtime.random.uniform(0.5, 1.5)
                    await self._runtime.sleep(jitter * self._settings.poll_retry_s)
        finally:
            self._followed.discard(name)
            self.restored.forget(name)
        if self._broker.table.find(name) is not None:
            self._observations.forget_reports(name)
            await self._pool.drop(name)
            self._start_following(name)  # the machine may have come back meanwhile

    async def _attempt(self, name: str, record: MachineRecord) -> bool:
        """Follow an agent until its connection ends; return whether a failure ended it."""
        fields = {"machine": name}
        try:
            await self._run_connection(name, await self._pool.get(record))
        except _StoreFailed as e:
            log.warning("facts of a machine were not stored", extra={**fields, "reason": str(e)})
        except (Unreachable, TimeoutError) as e:
            self._observations.silent(name, alive=isinstance(e, Refused))
            log.debug("agent does not answer", extra={**fields, "reason": str(e)})
        except TwineError as e:  # the agent answered, but with an error
            if isinstance(e, OlderStore):
                self.restored.record_refusal(name, str(e))
            if self._broker.table.find(name) is not None:
                was_answering = self._observations.observation(name).answering
                level = logging.WARNING if was_answering else logging.DEBUG
                log.log(level, "agent does not work", extra={**fields, "reason": str(e)})
                self._observations.silent(name, alive=True)
        except Exception:
            self._observations.silent(name)
            log.exception("following failed", extra=fields)
        else:
            return False
        return True

    async def _run_connection(self, name: str, agent: AgentApi) -> None:
        """List everything, then read events until some are lost or the address changes."""
        address = self._broker.table.get(name).address
        after, boot_id = await self._list_all(name, agent)
        self._observations.observation(name).stream = stream = agent.follow(after)
        try:
            while (record := self._own_record(name)) and record.address == address:
                events = await self._next_events(name, stream)
                if events is None or events.lost or events.boot_id not in ("", boot_id):
                    return
                await self._wait_for_turn(name)
                await self._process_events(name, agent, events)
        finally:
            self._observations.record_contact(name, stream.last_contact_at)
            self._observations.observation(name).stream = None
            await stream.close()

    async def _wait_for_turn(self, name: str) -> None:
        """Let other tasks of the event loop run: a thousand agents may answer at once.

        The agent is not called meanwhile, so its silence does not count (BUG-CP3).
        """
        self._observations.unasked(name)
        await self._runtime.checkpoint()
        self._observations.asked(name)

    async def _next_events(self, name: str, stream: EventStream) -> Events | None:
        """Return the next events of the agent; None if everything must be listed again."""
        if self._observations.observation(name).doubtful:
            return None
        wait = self._waits[name] = asyncio.timeout(None)
        try:
            async with wait:
                try:
                    return await stream.next()
                finally:
                    del self._waits[name]  # a timeout that has exited cannot be rescheduled
        except TimeoutError:
            if wait.expired():
                return None
            raise
        except TwineError:
            await self._runtime.checkpoint()  # thousands may be lost in one turn, with their MSB
            raise

    async def _list_all(self, name: str, agent: AgentApi) -> tuple[int, str]:
        """List everything; return the position of later events, and the boot it is valid for.

        The position is read first: an event may be seen twice, but none is lost.
        """
        async with asyncio.timeout(self._settings.poll_patience_s + CONNECT_S):
            facts = await agent.get_machine()
        if self._is_second(name, facts.boot_id):
            raise Conflict(
                f"a clone of {name} answers at its address: another host with its identity"
            )
        self._observations.record_contact(name)
        latest = (await self._call_agent(name, lambda: agent.get_events(0, 0.0))).latest
        tasks = await self._call_agent(name, agent.list_tasks)
        profile = await self._call_agent(name, agent.get_profile)
        images = await self._call_agent(name, agent.list_images)
        store_error = await self._store_facts(name, facts)
        digests = (image.digest for image in images.images)
        self._observations.listed(name, facts, tasks.tasks, profile, digests)
        self.restored.record_answer(name)
        if store_error is not None:
            raise _StoreFailed(str(store_error))
        return latest, facts.boot_id

    async def _call_agent(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return an agent's answer, a sign of life; a call without an answer is repeated once."""
        for tries_left in reversed(range(_TRIES)):
            try:
                async with asyncio.timeout(self._settings.call_timeout_s):
                    answer = await call()
                self._observations.record_contact(name)
                return answer
            except TimeoutError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _store_facts(self, name: str, facts: MachineFacts) -> TwineError | None:
        record = self._broker.table.find(name)
        if record is None or record.facts == facts:
            return None
        try:
            await self._broker.carry_out(name, NoteFacts(facts=facts))
        except NotFound:
            return None  # removed meanwhile
        except TwineError as e:
            return e
        return None

    async def _process_events(self, name: str, agent: AgentApi, events: Events) -> None:
        """Update the observation from events, or by calls for states that the events lack."""
        kinds = {event.kind for event in events.events}
        if "image" in kinds:
            images = await self._call_agent(name, agent.list_images)
            self._observations.observation(name).images = frozenset(i.digest for i in images.images)
        if kinds & {"profile", "leaving"}:
            # machine facts first: the new profile may have reserved memory
            store_error = await self._store_facts(
                name, await self._call_agent(name, agent.get_machine)
            )
            if store_error is not None:
                raise _StoreFailed(str(store_error))
        if "profile" in kinds:
            self._observations.saw_profile(name, await self._call_agent(name, agent.get_profile))
        if "task-removed" in kinds or any(_lacks_task(event) for event in events.events):
            self._observations.saw_tasks(
                name, (await self._call_agent(name, agent.list_tasks)).tasks
            )
            return
        for event in events.events:
            if event.task is not None:
                self._observations.saw_task(name, event.task)


def _lacks_task(event: Event) -> bool:
    return event.kind == "task" and event.task is None
