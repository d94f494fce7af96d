"""The scheduler: one loop per job that brings its tasks to what the job's record wants.

Each round: what agents reported is folded into the record, new decisions are added, the
record is stored, and only then the commands that follow from it are sent. A round that
changes nothing is harmless, so everything that may matter just wakes the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator

from agent.errors import Conflict, NotFound, TwineError
from control_plane.api.jobs import JobRecord, JobStatus, task_id
from control_plane.api.machines import MachineRecord
from control_plane.core.reconcile import (
    Start,
    Stop,
    View,
    commands,
    next_look,
    observe,
    spec_of,
)
from control_plane.core.rollout import (
    apply_plan,
    begin_updates,
    is_overdue,
    must_move,
    next_updates,
    prune,
    resize,
    summarize,
)
from control_plane.core.task_spec import task_spec
from control_plane.services.allocator import Allocator
from control_plane.services.dispatcher import Dispatcher
from control_plane.services.region import Region
from control_plane.services.table import ignore
from control_plane.store import Put
from control_plane.store.records import retired_key

log = logging.getLogger(__name__)
_PAUSE_S = 0.01
"""After each round of a job, so that a flood of reports costs few rounds."""
_GATHER_S = 0.05
"""What makes room comes in crowds; jobs that wait for some are woken once for all of it."""


class Scheduler:
    """Owner of the life of jobs and tasks."""

    def __init__(
        self,
        region: Region,
        allocator: Allocator,
        dispatcher: Dispatcher,
    ) -> None:
        """Run nothing yet."""
        self._jobs = region.jobs
        self._broker, self._fleet = region.broker, region.fleet
        self._settings, self._clock = region.settings, region.clock
        self._allocator = allocator
        self._dispatcher = dispatcher
        self._epoch = 0
        self._group: asyncio.TaskGroup | None = None
        self._wakes: dict[str, asyncio.Event] = {}
        self._is_waking = False
        self._details: dict[str, str] = {}
        self._awaited: dict[str, set[str]] = defaultdict(set)
        """Machine → jobs that wait for their image to be brought there."""
        region.jobs.listen(lambda name, *_: self._wake(name))
        region.broker.listen(self._machine_changed, loaded=ignore)
        region.fleet.listen(self._machine_seen)

    async def run(self, epoch: int) -> None:
        """Schedule all jobs, in this term, until cancelled."""
        self._epoch = epoch
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._jobs:
                    self._wake(name)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None  # news may still come while everything ends

    def status(self, name: str) -> JobStatus:
        """Return a job as its owner sees it."""
        return summarize(self._jobs.get(name), self._details.get(name, ""))

    async def logs(
        self, name: str, index: int, *, follow: bool, since: str | None, tail: int | None
    ) -> AsyncIterator[bytes]:
        """Yield what a task wrote, from the machine where it is now."""
        record = self._jobs.get(name)
        task = next((task for task in record.tasks if task.index == index), None)
        if task is None or task.placement is None:
            reason = f": {task.reason}" if task is not None and task.reason else ""
            raise NotFound(f"task {index} of job {name!r} is on no machine{reason}")
        chunks = self._dispatcher.logs(
            task.placement.machine,
            task_id(name, index),
            follow=follow,
            since=since,
            tail=tail,
        )
        async for chunk in chunks:
            yield chunk

    # -- waking

    def _wake(self, name: str) -> None:
        if name in self._wakes:
            self._wakes[name].set()
        elif self._group is not None and self._jobs.find(name) is not None:
            self._wakes[name] = asyncio.Event()
            self._wakes[name].set()
            self._group.create_task(self._keep(name))

    def _machine_changed(self, name: str, *_: MachineRecord | None) -> None:
        for job in self._allocator.directory.jobs(name) | self._awaited.pop(name, set()):
            self._wake(job)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake the jobs of which tasks found no room, where there may be some in a moment."""
        if not self._is_waking and self._group is not None and self._allocator.waiting.is_due():
            self._is_waking = True
            asyncio.get_running_loop().call_later(_GATHER_S, self._wake_due)

    def _wake_due(self) -> None:
        self._is_waking = False
        for job in self._allocator.waiting.take_due():
            self._wake(job)

    def _machine_seen(self, name: str) -> None:
        self._machine_changed(name)
        self._remove_strays(name)

    def _remove_strays(self, name: str) -> None:
        """Stop what runs on a machine although it was moved away or its job is gone."""
        sight = self._fleet.sight(name)
        if self._group is None or not sight.answering:
            return
        for task in self._allocator.strays(name):
            generation = sight.tasks[task].generation
            if sight.stopped.get(task, 0) < generation:
                self._dispatcher.stop(Stop(name, task, generation))

    # -- one job

    async def _keep(self, name: str) -> None:
        """Look after one job until it is gone."""
        wake = self._wakes[name]
        pause: float | None = 0.0
        while self._jobs.find(name) is not None:
            await asyncio.sleep(_PAUSE_S)
            try:
                async with asyncio.timeout(pause):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            try:
                pause = await self._round(name)
            except Conflict as e:
                log.info("plan was overtaken", extra={"job": name, "reason": str(e)})
                pause = 0.1
            except TwineError as e:
                log.warning("round failed", extra={"job": name, "reason": str(e)})
                pause = self._settings.retry_s
            except Exception:
                log.exception("round failed", extra={"job": name})
                pause = self._settings.retry_s
        del self._wakes[name]
        self._details.pop(name, None)

    async def _round(self, name: str) -> float:
        """Decide, store, send; return when to look again at the latest."""
        async with self._jobs.lock(name):
            before = self._jobs.find(name)
            if before is None:
                return 0.0
            now = self._clock()
            view = self._view(before, now)
            after = await self._decide(before, view, now)
            if after.stopping and not after.tasks:
                await self._retire(after)
                return 0.0
            if after != before:
                await self._jobs.commit(name, after)
        self._wake_waiting()
        self._send(after, self._view(after, now))
        look = next_look(after, now)
        resync_s = self._settings.resync_s
        return resync_s if look is None else min(resync_s, look - now)

    async def _decide(self, record: JobRecord, view: View, now: float) -> JobRecord:
        """Return what the record becomes; the machines in it are allocated durably already."""
        record = resize(observe(record, view, now), now)
        record = prune(self._begin_updates(record, view, now))
        return apply_plan(record, await self._allocator.place(record, view), now)

    def _begin_updates(self, record: JobRecord, view: View, now: float) -> JobRecord:
        """Take outdated tasks down, and those that must move, if they have a place then.

        The image is brought there first: an old task is not stopped for a new one that
        cannot start.
        """
        updates = next_updates(record, view)
        detail, begun = updates.reason, set[int]()
        by_index = {task.index: task for task in record.tasks}
        for index in updates.indexes:
            task = by_index[index]
            if is_overdue(task, view):
                begun.add(index)
                continue
            target = self._allocator.target(record, task, must_move=must_move(task, view))
            if not target.machine:
                detail = f"the update waits for room: {'; '.join(target.reasons)}"
                continue
            sight = self._fleet.sight(target.machine)
            if target.is_taken or record.spec.image in sight.images:
                begun.add(index)
                continue
            self._awaited[target.machine].add(record.name)
            self._dispatcher.prestage(target.machine, record.spec.image)
            refused = sight.refused.get(record.spec.image)
            detail = f"the update waits for its image: {refused}" if refused else detail
        self._details[record.name] = detail
        return begin_updates(record, begun, now) if begun else record

    def _view(self, record: JobRecord, now: float) -> View:
        machines = {task.placement.machine for task in record.tasks if task.placement is not None}
        pool = self._allocator.pool_of(record)
        return self._fleet.view(pool, machines | record.leaving.keys(), now)

    async def _retire(self, record: JobRecord) -> None:
        """Remove a job whose tasks are gone, but remember its last generation.

        A job created again under the name goes on from there, so that agents do not take
        its commands for old ones.
        """
        await self._allocator.forget(record.name)
        last = Put(retired_key(record.name), str(record.generation).encode())
        await self._jobs.commit(record.name, None, also=[last])
        log.info("job gone", extra={"job": record.name})

    def _send(self, record: JobRecord, view: View) -> None:
        tasks = {task.index: task for task in record.tasks}
        for command in commands(record, view):
            if isinstance(command, Start):
                spec = task_spec(
                    spec_of(record, tasks[command.index]),
                    command.index,
                    command.placement,
                    generation=command.generation,
                    epoch=self._epoch,
                )
                self._dispatcher.start(command, spec)
            else:
                self._dispatcher.stop(command)
