"""Carries commands to agents: each at most once at a time, none delayed by a slow machine.

A command is derived when its turn has come, not when it was asked for: decisions made while it
waited for a slot, for the rate limit or for an image count (the opposite was BUG-CP7). A failed
command is derived again after a pause; agents fence commands by generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from agent.api import ProfileSpec, TaskSpec
from control_plane.agents.core.commands import Command, Stop
from control_plane.agents.core.seen import is_empty
from control_plane.agents.core.stop_queue import QueuePlace, StopQueue
from control_plane.agents.observations import PROFILE
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentApi
from control_plane.agents.region import Region
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord
from control_plane.images.store import FindImage
from control_plane.images.trust import distrust_in, pull_of, trust_in
from control_plane.runtime.table import ignore
from wire.errors import Conflict, NotFound, TwineError, Unprocessable, Unreachable

log = logging.getLogger(__name__)
Wanted = Callable[[str, str], TaskSpec | Stop | None]
"""Returns the command about a task that a machine must get now; None: none."""
_PER_MACHINE = 4
"""Calls in flight per machine, and images that it pulls at once."""
_QUICK_S = 1.0
"""A call without an answer by then releases its slot and continues. So a slow agent costs memory
for its pending calls, but does not delay other agents (BUG-CP11, F-53)."""
_PULL_TIMEOUT_S = 900.0
_PAUSE_MAX_S = 60.0
_ASK_PROFILE = "profile?"


@dataclass(slots=True)
class _Line:
    """The pending commands of one machine; removed with the last of them."""

    machine: str
    pending: dict[str, bool] = field(default_factory=dict)
    """What → whether the rate limit let it pass already."""
    in_flight: set[str] = field(default_factory=set)
    pauses: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What failed → until when it is not tried, and how long that pause was."""
    pulls: dict[str, set[str]] = field(default_factory=dict)
    """Image that is being pulled → tasks that wait for it."""
    calls: dict[str, tuple[str, asyncio.Timeout]] = field(default_factory=dict)
    """Image that is being pulled → boot of the machine at the call, and the timeout of the call."""
    pulling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PER_MACHINE))
    queued: bool = False

    def is_idle(self) -> bool:
        return not (self.pending or self.in_flight or self.pauses or self.pulls)


class Dispatcher:
    """The only way from the control plane to an agent's tasks, images and profile."""

    def __init__(self, region: Region, pool: AgentPool, find_image: FindImage) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._settings, self._runtime = region.settings, region.runtime
        self._pool, self._find_image = pool, find_image
        self._number: Callable[[], int] = int
        self._group: asyncio.TaskGroup | None = None
        self._lines: dict[str, _Line] = {}
        self._order: deque[_Line] = deque()
        """Machines with a pending command that may go at once, by turns."""
        self._stops, self._slots = StopQueue(), region.settings.concurrent_calls
        per_s, burst = region.settings.destructive_per_s, region.settings.destructive_burst
        self._limit = region.limits.of(LimitName.STOPS, per_s, burst)
        self._release_at: asyncio.TimerHandle | None = None
        region.broker.listen(self._machine_changed, loaded=ignore)
        self._observations.listen(self._listed_again, lambda _machine, _which: None)
        self.wanted: Wanted = lambda _machine, _task: None
        """The source of what is wanted: the scheduler sets it."""
        self.profile_text: Callable[[str], str] = lambda _: ""
        """Returns the text of a profile that hosts do not have; set by the owner."""

    async def run(self, number: Callable[[], int]) -> None:
        """Carry commands until cancelled, each with the number of the term that it is made in."""
        self._number = number
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._fill()
            self._release()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # reports may still arrive during the shutdown
                if self._release_at is not None:
                    self._release_at.cancel()

    def send(self, command: Command) -> None:
        """Send a command to an agent, when its turn has come and if it is still wanted."""
        if isinstance(command, Stop):
            self._ask_stop(command)
        else:
            self._ask(command.machine, command.task)

    def prestage(self, machine: str, digest: str, keys: Sequence[str] = ()) -> None:
        """Bring an image to a machine ahead of its use, if one of these keys signed it."""
        if digest not in self._observations.observation(machine).images:
            line = self._line(machine)
            if not self._is_paused(line, digest):
                self._pull(line, digest, keys)

    async def distrust(self, digest: str, keys: Sequence[str]) -> str:
        """Return why hosts would refuse an image, empty where they would not."""
        return await distrust_in(self._find_image, digest, keys)

    def put_profile(self, machine: str) -> None:
        """Ask a machine for the profile that its record wants."""
        self._ask(machine, PROFILE)

    def ask_profile(self, machine: str) -> None:
        """Ask a machine for the state of its profile; the answer goes to the observations."""
        self._ask(machine, _ASK_PROFILE)

    async def agent(self, machine: str) -> AgentApi:
        """Return a client of a machine's agent; calls of others need no turn."""
        return await self._pool.get(self._broker.table.get(machine))

    # -- turns

    def _line(self, machine: str) -> _Line:
        return self._lines.get(machine) or self._lines.setdefault(machine, _Line(machine))

    def _is_paused(self, line: _Line, what: str) -> bool:
        return what in line.pauses and self._runtime.now() < line.pauses[what][0]

    def _ask(self, machine: str, what: str, *, passed: bool = False) -> None:
        """Queue a command for its turn, once."""
        line = self._line(machine)
        awaits_image = any(what in tasks for tasks in line.pulls.values())
        if awaits_image or what in line.in_flight or self._is_paused(line, what):
            return
        line.pending[what] = passed or line.pending.get(what, False)
        self._queue(line)
        self._fill()

    def _ask_stop(self, stop: Stop) -> None:
        """Queue a stop for the rate limit, then for its turn."""
        machine, task, line = stop.machine, stop.task, self._lines.get(stop.machine)
        if line is not None:
            passed = line.pending.get(task, False)
            if passed or task in line.in_flight or self._is_paused(line, task):
                return
            line.pending.pop(task, None)  # a start that is no longer wanted
        status = self._observations.observation(machine).tasks.get(task)
        entitlement = status.entitlement if status else ""
        self._stops.add(QueuePlace(machine, task), entitlement, urgent=stop.urgent)
        self._release()

    def _release(self) -> None:
        """Let stops pass that are still wanted, as far as the rate limit allows."""
        if self._group is None or self._release_at is not None:
            return
        while (place := self._stops.first()) is not None:
            wanted = self.wanted(place.machine, place.task)
            if isinstance(wanted, Stop):
                wait_s = self._limit.take(self._runtime.now())
                self._limit.held = len(self._stops) if wait_s > 0 else 0
                if wait_s > 0:
                    loop = asyncio.get_running_loop()
                    self._release_at = loop.call_later(wait_s, self._release_again)
                    return
                self._stops.take(place)
                self._ask(place.machine, place.task, passed=True)
            else:
                self._stops.discard(place)
                if wanted is not None:
                    self._ask(place.machine, place.task)

    def _release_again(self) -> None:
        self._release_at = None
        self._release()

    def _queue(self, line: _Line) -> None:
        if line.pending and not line.queued and len(line.in_flight) < _PER_MACHINE:
            line.queued = True
            self._order.append(line)

    def _fill(self) -> None:
        """Start what may start: one command of each machine, by turns."""
        while self._group is not None and self._slots > 0 and self._order:
            line = self._order.popleft()
            line.queued = False
            if not line.pending:
                continue
            what = next(iter(line.pending))
            passed = line.pending.pop(what)
            line.in_flight.add(what)
            self._slots -= 1
            self._runtime.spawn_in(self._group, "dispatcher", self._attempt(line, what, passed))
            self._queue(line)

    async def _attempt(self, line: _Line, what: str, passed: bool) -> None:
        holds = True

        def give_slot() -> None:
            nonlocal holds
            if holds:
                holds = False
                self._slots += 1
                self._fill()

        giving = asyncio.get_running_loop().call_later(_QUICK_S, give_slot)
        try:
            await self._runtime.checkpoint()  # all slots may be filled in one turn
            await self._carry(line, what, passed)
        except (TwineError, TimeoutError) as e:
            self._failed(line, what, e)
        except Exception as e:
            log.exception("command broke", extra={"machine": line.machine, "object": what})
            self._failed(line, what, e)
        else:
            line.pauses.pop(what, None)
        finally:
            giving.cancel()
            line.in_flight.discard(what)
            self._queue(line)
            self._tidy(line)
            give_slot()
            self._fill()  # its slot may have been another's for long

    def _failed(self, line: _Line, what: str, error: Exception) -> None:
        """Record why, and derive the command again after a pause."""
        pause = min(2 * line.pauses.get(what, (0.0, self._settings.retry_s / 2))[1], _PAUSE_MAX_S)
        line.pauses[what] = (self._runtime.now() + pause, pause)
        asyncio.get_running_loop().call_later(pause, self._again, line, what)
        machine = line.machine
        reason = str(error) or f"no answer within {self._settings.call_timeout_s:g} s"
        fields = {"machine": machine, "object": what, "reason": reason}
        log.warning("command to agent failed", extra=fields)
        if what == _ASK_PROFILE or self._broker.table.find(machine) is None:
            return  # the health checker notices if the machine is gone
        unknown = isinstance(error, TimeoutError | Unreachable | Conflict)
        self._observations.refused(machine, what, f"{machine}: {reason}", doubtful=unknown)

    def _again(self, line: _Line, what: str) -> None:
        """End a pause; its length is remembered until it succeeds or is no longer wanted."""
        if self._group is None or self._lines.get(line.machine) is not line:
            return
        wanted = self.wanted(line.machine, what)
        if wanted is None:
            loop = asyncio.get_running_loop()
            loop.call_later(_PAUSE_MAX_S, self._forgive, line, what, line.pauses.get(what))
            self._observations.changed(line.machine)  # wakes callers that wait
        elif isinstance(wanted, Stop):
            self._ask_stop(wanted)
        else:
            self._ask(line.machine, what)

    def _forgive(self, line: _Line, what: str, pause: tuple[float, float] | None) -> None:
        """Forget a failure that did not happen again."""
        if line.pauses.get(what) == pause:
            line.pauses.pop(what, None)
            self._tidy(line)

    def _tidy(self, line: _Line) -> None:
        if line.is_idle() and self._lines.get(line.machine) is line:
            del self._lines[line.machine]

    def _machine_changed(
        self, name: str, _: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Drop what waits for a machine that is gone, and its connections."""
        if after is not None:
            return
        if (line := self._lines.pop(name, None)) is not None:
            line.pending.clear()
            line.pauses.clear()
        if self._group is not None:
            self._runtime.spawn_in(self._group, "dispatcher", self._pool.drop(name))

    # -- carrying

    async def _carry(self, line: _Line, what: str, passed: bool) -> None:
        """Send the agent the command that is wanted at this moment."""
        machine = line.machine
        async with asyncio.timeout(self._settings.call_timeout_s):
            if what == PROFILE:
                await self._put_profile(machine)
            elif what == _ASK_PROFILE:
                seen = await (await self.agent(machine)).get_profile()
                self._observations.saw_profile(machine, seen)
            else:
                wanted = self.wanted(machine, what)
                if isinstance(wanted, TaskSpec):
                    await self._start(line, what, wanted)
                elif wanted is not None and passed:
                    await self._stop(wanted)
                elif wanted is not None:
                    line.in_flight.discard(what)
                    self._ask_stop(wanted)

    async def _start(self, line: _Line, task: str, spec: TaskSpec) -> None:
        machine, keys = line.machine, spec.image_trust.keys
        trust = await trust_in(self._find_image, spec.image, keys)
        if spec.image not in self._observations.observation(machine).images:
            self._pull(line, spec.image, keys, task)
            return
        spec = replace(spec, image_trust=trust)
        try:
            status = await (await self.agent(machine)).put_task(task, spec)
        except (NotFound, Unprocessable):
            # perhaps the image was removed meanwhile: the next attempt asks for it again
            self._observations.observation(machine).images -= {spec.image}
            raise
        self._observations.answered(machine, status)
        fields = {"task": task, "machine": machine, "generation": spec.generation}
        log.info("task put", extra=fields)

    async def _stop(self, command: Stop) -> None:
        name, machine, generation = command.task, command.machine, command.generation
        gone = False
        try:
            status = await (await self.agent(machine)).delete_task(name, generation, self._number())
        except NotFound:
            gone = True
        else:
            self._observations.answered(machine, status, removed=True)
        self._observations.stop_confirmed(machine, name, generation, gone=gone)
        log.info("task stopped", extra={"task": name, "machine": machine})

    async def _put_profile(self, machine: str) -> None:
        record = self._broker.table.get(machine)
        if not record.entitlement:
            return
        spec = ProfileSpec(
            name=record.profile_wanted,
            text=self.profile_text(record.profile_wanted),
            generation=record.assignment_generation,
            epoch=self._number(),
            allow_reboot=is_empty(self._observations.observation(machine).tasks),
        )
        seen = await (await self.agent(machine)).put_profile(spec)
        self._observations.saw_profile(machine, seen)

    # -- images

    def _pull(self, line: _Line, digest: str, keys: Sequence[str], task: str = "") -> None:
        """Bring an image to a machine; a task that waits for it delays no other task."""
        if digest in line.pulls:
            line.pulls[digest] |= {task} if task else set()
        elif self._group is not None:
            line.pulls[digest] = {task} if task else set()
            self._runtime.spawn_in(self._group, "dispatcher", self._bring(line, digest, keys))

    async def _bring(self, line: _Line, digest: str, keys: Sequence[str]) -> None:
        """Make a machine pull an image, then queue the tasks that wait for it."""
        machine, error = line.machine, None
        try:
            async with asyncio.timeout(_PULL_TIMEOUT_S) as limit, line.pulling:
                line.calls[digest] = (self._observations.observation(machine).boot_id, limit)
                try:
                    await self._ensure_image(machine, digest, keys)
                finally:
                    del line.calls[digest]  # a timeout that was left cannot be rescheduled
        except Exception as e:
            error = e if str(e) else Unreachable(f"no image {digest[:14]} and no answer came")
            if not isinstance(e, TwineError | TimeoutError):
                log.exception("image pull broke", extra={"machine": machine, "object": digest})
        finally:
            waiting = sorted(line.pulls.pop(digest))  # also if this run of the dispatcher ends
        if error is not None:
            for what in [*waiting, digest]:
                self._failed(line, what, error)
            return
        line.pauses.pop(digest, None)
        self._observations.image_came(machine, digest)
        if self._lines.get(machine) is line:
            for task in waiting:
                self._ask(machine, task)
        self._tidy(line)

    def _listed_again(self, machine: str) -> None:
        """Cancel pulls that were requested in an earlier boot: those calls get no answer.

        A host that lost its power reports nothing, and pulls may take long.
        """
        line, boot_id = self._lines.get(machine), self._observations.observation(machine).boot_id
        for asked_in, limit in line.calls.values() if line is not None else ():
            if asked_in and asked_in != boot_id and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _ensure_image(self, machine: str, digest: str, keys: Sequence[str]) -> None:
        if digest not in self._observations.observation(machine).images:
            pull = await pull_of(self._find_image, digest, keys, machine)
            await (await self.agent(machine)).pull_image(pull)
