"""Carries commands to agents: each at most once at a time, none blocked by a slow machine.

Commands are idempotent by generation, so one that fails is simply derived again from the
record and sent again after a pause. Stops are rate-limited over all machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agent.api import ImagePull, ProfileSpec, TaskSpec
from agent.errors import Conflict, NotFound, TwineError, Unprocessable, Unreachable
from control_plane.core.reconcile import Start, Stop
from control_plane.services.agents import AgentApi, AgentPool, FindImage
from control_plane.services.region import Region

log = logging.getLogger(__name__)
_PER_MACHINE = 4
"""Calls in flight per machine, so that a slow one does not take all of them."""
_PULL_TIMEOUT_S = 900.0
_PAUSE_MAX_S = 60.0


class TokenBucket:
    """At most `burst` at once and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: int) -> None:
        """Start full."""
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at = float(burst), 0.0

    async def take(self) -> None:
        """Return when one more is allowed, in the order of asking."""
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._per_s)


class Dispatcher:
    """The only way from the control plane to an agent's tasks, images and profile."""

    def __init__(
        self,
        region: Region,
        pool: AgentPool,
        find_image: FindImage,
    ) -> None:
        """Send nothing yet."""
        self._broker, self._fleet = region.broker, region.fleet
        self._settings = settings = region.settings
        self._pool = pool
        self._find_image = find_image
        self._epoch = 0
        self._group: asyncio.TaskGroup | None = None
        self._in_flight: set[tuple[str, str]] = set()
        self._pauses: dict[tuple[str, str], tuple[float, float]] = {}
        self._bucket = TokenBucket(settings.destructive_per_s, settings.destructive_burst)
        self._calls = asyncio.Semaphore(settings.concurrent_calls)
        self._per_machine: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_PER_MACHINE)
        )

    async def run(self, epoch: int) -> None:
        """Carry commands, stamped with this term, until cancelled."""
        self._epoch = epoch
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # news may still come while everything ends

    def start(self, command: Start, spec: TaskSpec) -> None:
        """Bring the image to the machine, then put the task."""
        self._send(command.machine, command.task, lambda: self._start(command, spec))

    def stop(self, command: Stop) -> None:
        """Delete a task, when the rate limit allows."""
        self._send(command.machine, command.task, lambda: self._stop(command))

    def prestage(self, machine: str, digest: str) -> None:
        """Bring an image to a machine ahead of its use."""
        if digest not in self._fleet.sight(machine).images:
            self._send(machine, digest, lambda: self._ensure_image(machine, digest))

    def put_profile(self, machine: str, *, allow_reboot: bool) -> None:
        """Ask a machine for the profile that its record wants."""
        self._send(machine, "profile", lambda: self._put_profile(machine, allow_reboot))

    async def refresh_profile(self, machine: str) -> None:
        """Ask a machine how its profile stands."""
        try:
            async with self._call(machine):
                seen = await (await self._agent(machine)).get_profile()
        except (TwineError, TimeoutError):
            return  # the health checker notices if the machine is gone
        self._fleet.saw_profile(machine, seen)

    async def logs(
        self, machine: str, task: str, *, follow: bool, since: str | None, tail: int | None
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote on a machine."""
        agent = await self._agent(machine)
        async for chunk in agent.task_logs(task, follow=follow, since=since, tail=tail):
            yield chunk

    async def _agent(self, machine: str) -> AgentApi:
        return await self._pool.get(self._broker.table.get(machine))

    @asynccontextmanager
    async def _call(self, machine: str) -> AsyncIterator[None]:
        """Hold a slot of the machine, then one of all, and only then watch the time."""
        async with (
            self._per_machine[machine],
            self._calls,
            asyncio.timeout(self._settings.call_timeout_s),
        ):
            yield

    def _send(self, machine: str, what: str, call: Callable[[], Awaitable[None]]) -> None:
        """Begin a command unless one for the same object is under way or just failed."""
        key = (machine, what)
        now = asyncio.get_running_loop().time()
        if self._group is None or key in self._in_flight:
            return
        if key in self._pauses and now < self._pauses[key][0]:
            return
        self._in_flight.add(key)
        self._group.create_task(self._attempt(machine, what, call))

    async def _attempt(self, machine: str, what: str, call: Callable[[], Awaitable[None]]) -> None:
        key = (machine, what)
        try:
            await call()
        except (TwineError, TimeoutError) as e:
            self._in_flight.discard(key)
            self._failed(key, e)
        else:
            self._in_flight.discard(key)
            self._pauses.pop(key, None)
            self._fleet.changed(machine)

    def _failed(self, key: tuple[str, str], error: TwineError | TimeoutError) -> None:
        machine, what = key
        loop = asyncio.get_running_loop()
        last = self._pauses.get(key, (0.0, self._settings.retry_s / 2))[1]
        pause = min(last * 2, _PAUSE_MAX_S)
        self._pauses[key] = (loop.time() + pause, pause)
        loop.call_later(pause, self._fleet.changed, machine)
        reason = str(error) or f"no answer within {self._settings.call_timeout_s:g} s"
        log.warning(
            "command to agent failed",
            extra={"machine": machine, "object": what, "reason": reason},
        )
        unknown = isinstance(error, TimeoutError | Unreachable | Conflict)
        self._fleet.refused(machine, what, f"{machine}: {reason}", doubtful=unknown)

    async def _start(self, command: Start, spec: TaskSpec) -> None:
        await self._ensure_image(command.machine, spec.image)
        try:
            async with self._call(command.machine):
                agent = await self._agent(command.machine)
                status = await agent.put_task(command.task, spec)
        except (NotFound, Unprocessable):
            # perhaps the image was removed meanwhile: the next attempt asks for it again
            self._fleet.sight(command.machine).images -= {spec.image}
            raise
        self._fleet.saw_task(command.machine, status)
        log.info(
            "task put",
            extra={
                "task": command.task,
                "machine": command.machine,
                "generation": command.generation,
            },
        )

    async def _stop(self, command: Stop) -> None:
        await self._bucket.take()
        name, generation = command.task, command.generation
        gone = False
        try:
            async with self._call(command.machine):
                agent = await self._agent(command.machine)
                status = await agent.delete_task(name, generation, self._epoch)
        except NotFound:
            gone = True
        else:
            self._fleet.saw_task(command.machine, status)
        self._fleet.stop_confirmed(command.machine, name, generation, gone=gone)
        log.info("task stopped", extra={"task": name, "machine": command.machine})

    async def _ensure_image(self, machine: str, digest: str) -> None:
        if digest in self._fleet.sight(machine).images:
            return
        image = await self._find_image(digest)
        if image is None:
            raise NotFound(
                f"cannot bring image {digest} to machine {machine}: the image store has it no more",
                hint="push it again",
            )
        pull = ImagePull(digest=digest, format=image.format, path=f"/v1/images/{digest}/stream")
        async with asyncio.timeout(_PULL_TIMEOUT_S), self._per_machine[f"{machine} images"]:
            if digest not in self._fleet.sight(machine).images:
                await (await self._agent(machine)).pull_image(pull)
        self._fleet.sight(machine).images |= {digest}

    async def _put_profile(self, machine: str, allow_reboot: bool) -> None:
        record = self._broker.table.get(machine)
        spec = ProfileSpec(
            name=record.profile_wanted,
            generation=record.assignment_generation,
            epoch=self._epoch,
            allow_reboot=allow_reboot,
        )
        async with self._call(machine):
            status = await (await self._agent(machine)).put_profile(spec)
        self._fleet.saw_profile(machine, status)
