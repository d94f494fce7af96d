"""Sends commands to agents: each at most once at a time, none delayed by a slow machine.

A command is derived when its turn has come, not when it was requested. So it follows decisions made
while it waited for a slot, for the rate limit or for an image (BUG-CP7). A failed command is
derived again after a pause. Agents refuse commands with an outdated generation.

The *subject* of a command is a task, an image, `PROFILE` (set it) or `_GET_PROFILE` (read it).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from agent.api import ProfileSpec, TaskSpec
from control_plane.agents.core.commands import Command, Stop
from control_plane.agents.core.observed import is_empty
from control_plane.agents.core.stop_queue import QueuePlace, StopQueue
from control_plane.agents.machine_queue import CALLS_MAX, PAUSE_MAX_S, MachineQueue, Pause
from control_plane.agents.observations import PROFILE
from control_plane.agents.pool import AgentPool
from control_plane.agents.protocol import AgentApi
from control_plane.agents.region import Region
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord
from control_plane.images.store import FindImage
from control_plane.images.trust import checked_trust, distrust_reason, pull_request
from control_plane.runtime.table import ignore
from wire.errors import Conflict, NotFound, TwineError, Unprocessable, Unreachable

log = logging.getLogger(__name__)
Wanted = Callable[[str, str], TaskSpec | Stop | None]
"""Returns the command about a task that a machine must get now; None: none."""
_QUICK_S = 1.0
"""A call without an answer by then releases its slot and continues. So a slow agent costs memory
for its pending calls, but does not delay other agents (BUG-CP11, F-53)."""
_PULL_TIMEOUT_S = 900.0
_GET_PROFILE = "profile?"


class Dispatcher:
    """The only way from the control plane to an agent's tasks, images and profile."""

    def __init__(self, region: Region, pool: AgentPool, find_image: FindImage) -> None:
        self._broker, self._observations = region.broker, region.observations
        self._settings, self._runtime = region.settings, region.runtime
        self._pool, self._find_image = pool, find_image
        self._term: Callable[[], int] = int
        self._group: asyncio.TaskGroup | None = None
        self._queues: dict[str, MachineQueue] = {}
        self._ready: deque[MachineQueue] = deque()
        """Machines with a pending command and fewer than `CALLS_MAX` calls, by turns."""
        self._stops, self._slots = StopQueue(), region.settings.concurrent_calls
        per_s, burst = region.settings.destructive_per_s, region.settings.destructive_burst
        self._limit = region.limits.of(LimitName.STOPS, per_s, burst)
        self._stop_timer: asyncio.TimerHandle | None = None
        region.broker.listen(self._machine_changed, loaded=ignore)
        self._observations.listen(self._cancel_outdated_pulls, lambda _machine, _which: None)
        self.wanted: Wanted = lambda _machine, _task: None
        """Returns the wanted command; the scheduler sets it."""
        self.profile_text: Callable[[str], str] = lambda _: ""
        """Returns the text of a profile that hosts do not have; set by the owner."""

    async def run(self, term: Callable[[], int]) -> None:
        """Send commands until cancelled; `term` returns the number of the present term."""
        self._term = term
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._start_commands()
            self._admit_stops()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # reports may still arrive during the shutdown
                if self._stop_timer is not None:
                    self._stop_timer.cancel()
                    self._stop_timer = None  # the next run admits stops again

    def send(self, command: Command) -> None:
        """Send a command to an agent, when its turn has come and if it is still wanted."""
        if isinstance(command, Stop):
            self._enqueue_stop(command)
        else:
            self._enqueue(command.machine, command.task)

    def prestage(self, machine: str, digest: str, keys: Sequence[str] = ()) -> None:
        """Make a machine pull an image before its use, if one of these keys signed it."""
        if digest not in self._observations.observation(machine).images:
            queue = self._queue_of(machine)
            if not queue.is_paused(digest, self._runtime.now()):
                self._begin_pull(queue, digest, keys)

    async def distrust(self, digest: str, keys: Sequence[str]) -> str:
        """Return why hosts would refuse an image; empty: they would not."""
        return await distrust_reason(self._find_image, digest, keys)

    def put_profile(self, machine: str) -> None:
        """Make a machine apply the profile that its record wants."""
        self._enqueue(machine, PROFILE)

    def ask_profile(self, machine: str) -> None:
        """Read the state of a machine's profile; the answer goes to the observations."""
        self._enqueue(machine, _GET_PROFILE)

    async def agent(self, machine: str) -> AgentApi:
        """Return a client of a machine's agent; calls of other components need no turn."""
        return await self._pool.get(self._broker.table.get(machine))

    # -- turns

    def _queue_of(self, machine: str) -> MachineQueue:
        return self._queues.get(machine) or self._queues.setdefault(machine, MachineQueue(machine))

    def _enqueue(self, machine: str, subject: str, *, is_admitted: bool = False) -> None:
        """Queue a command for its turn, once."""
        queue = self._queue_of(machine)
        if queue.is_busy_with(subject, self._runtime.now()):
            return
        queue.pending[subject] = is_admitted or queue.pending.get(subject, False)
        self._schedule(queue)
        self._start_commands()

    def _enqueue_stop(self, stop: Stop) -> None:
        """Queue a stop for the rate limit, then for its turn."""
        machine, task, queue = stop.machine, stop.task, self._queues.get(stop.machine)
        if queue is not None:
            is_admitted = queue.pending.get(task, False)
            if is_admitted or task in queue.in_flight or queue.is_paused(task, self._runtime.now()):
                return
            queue.pending.pop(task, None)  # a start that is no longer wanted
        status = self._observations.observation(machine).tasks.get(task)
        entitlement = status.entitlement if status else ""
        self._stops.add(QueuePlace(machine, task), entitlement, urgent=stop.urgent)
        self._admit_stops()

    def _admit_stops(self) -> None:
        """Queue the stops that are still wanted, as far as the rate limit allows."""
        if self._group is None or self._stop_timer is not None:
            return
        while (place := self._stops.first()) is not None:
            wanted = self.wanted(place.machine, place.task)
            if isinstance(wanted, Stop):
                wait_s = self._limit.take(self._runtime.now())
                self._limit.held = len(self._stops) if wait_s > 0 else 0
                if wait_s > 0:
                    loop = asyncio.get_running_loop()
                    self._stop_timer = loop.call_later(wait_s, self._resume_stops)
                    return
                self._stops.take(place)
                self._enqueue(place.machine, place.task, is_admitted=True)
            else:
                self._stops.discard(place)
                if wanted is not None:
                    self._enqueue(place.machine, place.task)

    def _resume_stops(self) -> None:
        self._stop_timer = None
        self._admit_stops()

    def _schedule(self, queue: MachineQueue) -> None:
        if queue.pending and not queue.is_scheduled and len(queue.in_flight) < CALLS_MAX:
            queue.is_scheduled = True
            self._ready.append(queue)

    def _start_commands(self) -> None:
        """Start commands while there are slots: one of each machine, by turns."""
        while self._group is not None and self._slots > 0 and self._ready:
            queue = self._ready.popleft()
            queue.is_scheduled = False
            if not queue.pending:
                continue
            subject = next(iter(queue.pending))
            is_admitted = queue.pending.pop(subject)
            queue.in_flight.add(subject)
            self._slots -= 1
            self._runtime.spawn_in(
                self._group, "dispatcher", self._run_command(queue, subject, is_admitted)
            )
            self._schedule(queue)

    async def _run_command(self, queue: MachineQueue, subject: str, is_admitted: bool) -> None:
        has_slot = True

        def release_slot() -> None:
            nonlocal has_slot
            if has_slot:
                has_slot = False
                self._slots += 1
                self._start_commands()

        slot_timer = asyncio.get_running_loop().call_later(_QUICK_S, release_slot)
        try:
            await self._runtime.checkpoint()  # many commands may start in one turn of the loop
            await self._execute(queue, subject, is_admitted)
        except (TwineError, TimeoutError) as e:
            self._note_failure(queue, subject, e)
        except Exception as e:
            log.exception("command broke", extra={"machine": queue.machine, "object": subject})
            self._note_failure(queue, subject, e)
        else:
            queue.pauses.pop(subject, None)
        finally:
            slot_timer.cancel()
            queue.in_flight.discard(subject)
            self._schedule(queue)
            self._drop_if_idle(queue)
            release_slot()
            self._start_commands()  # the slot may have been released long ago

    def _note_failure(self, queue: MachineQueue, subject: str, error: Exception) -> None:
        """Record why a command failed, and derive it again after a pause."""
        pause_s = queue.pause(subject, self._runtime.now(), self._settings.retry_s)
        asyncio.get_running_loop().call_later(pause_s, self._end_pause, queue, subject)
        machine = queue.machine
        reason = str(error) or f"no answer within {self._settings.call_timeout_s:g} s"
        fields = {"machine": machine, "object": subject, "reason": reason}
        log.warning("command to agent failed", extra=fields)
        if subject == _GET_PROFILE or self._broker.table.find(machine) is None:
            return  # the health checker notices if the machine is gone
        unknown = isinstance(error, TimeoutError | Unreachable | Conflict)
        self._observations.refused(machine, subject, f"{machine}: {reason}", doubtful=unknown)

    def _end_pause(self, queue: MachineQueue, subject: str) -> None:
        """End a pause; its length is kept until the command succeeds or is no longer wanted."""
        if self._group is None or self._queues.get(queue.machine) is not queue:
            return
        wanted = self.wanted(queue.machine, subject)
        if wanted is None:
            pause, loop = queue.pauses.get(subject), asyncio.get_running_loop()
            loop.call_later(PAUSE_MAX_S, self._forget_pause, queue, subject, pause)
            self._observations.changed(queue.machine)  # wakes callers that wait
        elif isinstance(wanted, Stop):
            self._enqueue_stop(wanted)
        else:
            self._enqueue(queue.machine, subject)

    def _forget_pause(self, queue: MachineQueue, subject: str, pause: Pause | None) -> None:
        """Forget a failure that did not happen again."""
        if queue.pauses.get(subject) == pause:
            queue.pauses.pop(subject, None)
            self._drop_if_idle(queue)

    def _drop_if_idle(self, queue: MachineQueue) -> None:
        if queue.is_idle() and self._queues.get(queue.machine) is queue:
            del self._queues[queue.machine]

    def _machine_changed(
        self, name: str, _: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Drop the commands and the connections of a machine that is gone."""
        if after is not None:
            return
        if (queue := self._queues.pop(name, None)) is not None:
            queue.pending.clear()
            queue.pauses.clear()
        if self._group is not None:
            self._runtime.spawn_in(self._group, "dispatcher", self._pool.drop(name))

    # -- sending

    async def _execute(self, queue: MachineQueue, subject: str, is_admitted: bool) -> None:
        """Send the agent the command that is wanted at this moment."""
        machine = queue.machine
        async with asyncio.timeout(self._settings.call_timeout_s):
            if subject == PROFILE:
                await self._put_profile(machine)
            elif subject == _GET_PROFILE:
                seen = await (await self.agent(machine)).get_profile()
                self._observations.saw_profile(machine, seen)
            else:
                wanted = self.wanted(machine, subject)
                if isinstance(wanted, TaskSpec):
                    await self._start(queue, subject, wanted)
                elif wanted is not None and is_admitted:
                    await self._stop(wanted)
                elif wanted is not None:
                    queue.in_flight.discard(subject)
                    self._enqueue_stop(wanted)

    async def _start(self, queue: MachineQueue, task: str, spec: TaskSpec) -> None:
        machine, keys = queue.machine, spec.image_trust.keys
        trust = await checked_trust(self._find_image, spec.image, keys)
        if spec.image not in self._observations.observation(machine).images:
            self._begin_pull(queue, spec.image, keys, task)
            return
        spec = replace(spec, image_trust=trust)
        try:
            status = await (await self.agent(machine)).put_task(task, spec)
        except (NotFound, Unprocessable):
            # the image may have been removed meanwhile: the next attempt pulls it again
            self._observations.observation(machine).images -= {spec.image}
            raise
        self._observations.answered(machine, status)
        fields = {"task": task, "machine": machine, "generation": spec.generation}
        log.info("task put", extra=fields)

    async def _stop(self, command: Stop) -> None:
        name, machine, generation = command.task, command.machine, command.generation
        gone = False
        try:
            status = await (await self.agent(machine)).delete_task(name, generation, self._term())
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
            epoch=self._term(),
            allow_reboot=is_empty(self._observations.observation(machine).tasks),
        )
        seen = await (await self.agent(machine)).put_profile(spec)
        self._observations.saw_profile(machine, seen)

    # -- images

    def _begin_pull(
        self, queue: MachineQueue, digest: str, keys: Sequence[str], task: str = ""
    ) -> None:
        """Begin the pull of an image; a task that waits for it delays no other task."""
        if digest in queue.pulls:
            queue.pulls[digest] |= {task} if task else set()
        elif self._group is not None:
            queue.pulls[digest] = {task} if task else set()
            self._runtime.spawn_in(self._group, "dispatcher", self._pull_image(queue, digest, keys))

    async def _pull_image(self, queue: MachineQueue, digest: str, keys: Sequence[str]) -> None:
        """Make a machine pull an image, then queue the tasks that wait for it."""
        machine, error = queue.machine, None
        try:
            async with asyncio.timeout(_PULL_TIMEOUT_S) as timeout, queue.pulling:
                observation = self._observations.observation(machine)
                queue.pull_calls[digest] = observation.boot_id, timeout
                try:
                    if digest not in observation.images:
                        pull = await pull_request(self._find_image, digest, keys, machine)
                        await (await self.agent(machine)).pull_image(pull)
                finally:
                    del queue.pull_calls[digest]  # a timeout that was left cannot be rescheduled
        except Exception as e:
            error = e if str(e) else Unreachable(f"no image {digest[:14]} and no answer came")
            if not isinstance(e, TwineError | TimeoutError):
                log.exception("image pull broke", extra={"machine": machine, "object": digest})
        finally:
            waiting = sorted(queue.pulls.pop(digest))  # also if this run of the dispatcher ends
        if error is not None:
            for subject in [*waiting, digest]:
                self._note_failure(queue, subject, error)
            return
        queue.pauses.pop(digest, None)
        self._observations.image_came(machine, digest)
        if self._queues.get(machine) is queue:
            for task in waiting:
                self._enqueue(machine, task)
        self._drop_if_idle(queue)

    def _cancel_outdated_pulls(self, machine: str) -> None:
        """Cancel pulls that were requested in an earlier boot of the host: they get no answer."""
        queue, boot_id = self._queues.get(machine), self._observations.observation(machine).boot_id
        for boot_of_call, timeout in queue.pull_calls.values() if queue is not None else ():
            if boot_of_call and boot_of_call != boot_id and not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())
