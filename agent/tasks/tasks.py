"""All tasks of this machine: creates, changes and removes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from agent.api import COUNT_MAX, Resize, TaskSpec, TaskState, TaskStatus
from agent.machine import HostHardware
from agent.resources.core.limits import resize_refusal, resized
from agent.runtime.core.records import (
    TASK_UNITS,
    Instant,
    TaskRecord,
    Tombstone,
    Wanted,
    has_own_init,
    is_expired,
    key_of,
    status_of,
)
from agent.runtime.crashpoints import crash_point
from agent.runtime.journal import Replay
from agent.tasks.admission import TaskAdmission
from agent.tasks.context import HostCapacity, TaskContext
from agent.tasks.core.admission import (
    accept,
    contradiction,
    is_over,
    stale,
    to_be_stopped,
    tombstone_of,
)
from agent.tasks.core.gate import with_gate
from agent.tasks.core.lifecycle import ASKED_AGAIN
from agent.tasks.core.own_init import choose_ids
from agent.tasks.core.reconcile import leftovers
from agent.tasks.queries import TaskQueries
from agent.tasks.supervisor import TaskLoop
from wire.errors import Conflict, HostError, NotFound, Unprocessable

log = logging.getLogger(__name__)

STOP_ASKED = "a stop was requested"
_UNKNOWN_IMAGE = "sha256:" + "0" * 64


class HostTasks(TaskQueries):
    """The tasks, each with its loop. The loops run in the daemon's task group."""

    def __init__(
        self,
        host: TaskContext,
        capacity: HostCapacity,
        hardware: HostHardware,
        group: asyncio.TaskGroup,
        *,
        reserve_bytes: int,
    ) -> None:
        """Start without tasks; `adopt` loads them. `reserve_bytes` of memory are for the host."""
        super().__init__()
        self._host = host
        self._capacity = capacity
        self._boot_id = hardware.boot_id
        self._group = group
        self._admission = TaskAdmission(
            capacity, hardware, reserve_bytes, self._others, self._is_over
        )
        self._tombstones: dict[str, Tombstone] = {}
        self._creating = asyncio.Lock()
        """Held while a task is created, so that tasks are created one after the other."""
        capacity.cpus.connect(self.wanted)
        capacity.pages.connect(self.wanted, self._is_over)
        capacity.memory.connect(self._unfinished_specs)

    async def adopt(self, replay: Replay) -> None:
        """Adopt the recorded tasks, which continue to run; remove what belongs to no task."""
        host = self._host
        self._tombstones = dict(replay.tombstones)
        self._unreadable = dict(replay.unreadable)
        units = [u.unit for u in await host.units.all(TASK_UNITS)]
        try:
            roots = await host.storage.tasks_with_root()
        except HostError as e:  # leftovers stay until the disk can be read
            log.error("cannot search for leftovers of tasks", extra={"why": str(e)})
            roots = []
        host.contact.adopt(replay)
        self._capacity.cpus.adopt(replay.tasks.values())
        for record in replay.tasks.values():
            self._start(record)
        for task_id in leftovers(replay.tasks, replay.unreadable, units, roots):
            log.warning(
                "removing the leftovers of a task without a record", extra={"task": task_id}
            )
            self._start(_removal_record(task_id))
        for task_id, why in replay.unreadable.items():
            message = f"the record cannot be read ({why}); its running processes are not stopped"
            log.error("a task record is unreadable", extra={"task": task_id, "why": why})
            host.events.add("agent", task_id, message)
        for loop in list(self._loops.values()):
            await loop.settled.wait()
        await self._forget_expired()

    def _start(self, record: TaskRecord, *, is_new: bool = False) -> None:
        loop = TaskLoop(self._host, record, self._on_removed, is_new=is_new)
        self._loops[record.task_id] = loop
        self._group.create_task(loop.run(), name=f"task-{record.task_id}")

    async def _on_removed(self, record: TaskRecord) -> None:
        tombstone = tombstone_of(record, self._now())
        await self._host.storage.save(tombstone)
        self._tombstones[record.task_id] = tombstone
        # No await from here to `del`: the task may be put again as soon as it is not listed.
        self._capacity.cpus.forget(record.task_id)
        self._host.contact.release(record.task_id)
        del self._loops[record.task_id]
        self._host.contact.recompute_term(loop.record.spec.epoch for loop in self._loops.values())
        self._host.events.add("task-removed", record.task_id, "stopped and removed")
        extra = {"task": record.task_id}
        log.info("task %s: stopped and removed", record.task_id, extra=extra)
        await self._capacity.memory.ended(record.task_id)
        await self._forget_expired()

    def _now(self) -> Instant:
        return Instant(time.time(), self._boot_id, self._host.contact.now_s())

    async def _forget_expired(self) -> None:
        """Remove tombstones that are too old, from memory and from the disk."""
        now = self._now()
        for task_id in [t for t, stone in self._tombstones.items() if is_expired(stone, now)]:
            if task_id in self._loops or task_id in self._being_created:
                continue
            if self._tombstones.pop(task_id, None) is not None:
                # Queued at once, so a record of this task that is saved later stays.
                await self._host.storage.forget(task_id)

    def _refuse_stale(
        self, task_id: str, spec: TaskSpec, known: TaskRecord | Tombstone | None
    ) -> None:
        if refused := stale(spec.generation, spec.epoch, known):
            raise Conflict(
                f"task {task_id} is not changed: {refused}",
                hint="read the task, then send a higher generation",
            )

    async def put(self, task_id: str, spec: TaskSpec) -> TaskStatus:
        """Store the desired state of a task; once this returns, it survives any crash."""
        with self._admitting(task_id, spec.image):
            return await self._put(task_id, spec)

    async def _put(self, task_id: str, spec: TaskSpec) -> TaskStatus:
        self._capacity.clones.check(f"task {task_id} is not changed")
        await self._capacity.cpus.refresh_for(spec)
        if spec.volumes:
            await self._capacity.lanes.run("btrfs", self._capacity.volumes.admit, task_id, spec)
        await self._admission.read_host(spec)
        image = await self._admission.read_image(spec)
        loop = self._loops.get(task_id)
        if loop is None:
            async with self._creating:
                if task_id not in self._loops:
                    self._refuse_stale(task_id, spec, self._tombstones.get(task_id))
                    self._admission.check(task_id, spec, image)
                    record = TaskRecord(task_id=task_id, spec=spec, boot_id=self._boot_id)
                    record = self._with_cpus(record)
                    return await self._create(record, is_new=task_id not in self._unreadable)
            return await self._put(task_id, spec)

        def changed(record: TaskRecord) -> TaskRecord:
            leaving = record.wanted is Wanted.GONE
            self._refuse_stale(
                task_id, spec, tombstone_of(record, self._now()) if leaving else record
            )
            if refused := contradiction(spec, record):
                raise Conflict(
                    f"task {task_id} is not changed: {refused}",
                    hint="send the change with a higher generation",
                )
            new = accept(task_id, spec, record)
            if new is None:
                return record
            self._admission.check(task_id, spec, image)
            new = with_gate(new, record)
            return self._with_cpus(replace(new, boot_id=self._boot_id))

        try:
            return status_of(await self._change(loop, changed))
        except NotFound:
            return await self._put(task_id, spec)

    def _with_cpus(self, record: TaskRecord) -> TaskRecord:
        """Return the record with the CPUs of its own and, for a task with an init of its own, its
        user ids.
        """
        task_id = record.task_id
        others = self._others(task_id) if record.spec.resources.exclusive_cpus else {}
        own = self._capacity.cpus.choose(task_id, record.spec, others)
        record = record if own == record.own_cpus else replace(record, own_cpus=own)
        if record.ids is not None or not has_own_init(record.spec):
            return record
        known = (loop.record.ids for loop in self._loops.values())
        return replace(record, ids=choose_ids(task_id, {ids for ids in known if ids is not None}))

    async def _change(self, loop: TaskLoop, make: Callable[[TaskRecord], TaskRecord]) -> TaskRecord:
        """Change a task; if the record cannot be saved, restore its previous CPUs."""
        try:
            return await loop.change(make)
        except HostError:
            self._capacity.cpus.restore(loop.record.task_id, loop.record.own_cpus)
            raise

    async def _create(self, record: TaskRecord, *, is_new: bool = False) -> TaskStatus:
        """Write the record of a new task to disk, then start its loop."""
        task_id, host = record.task_id, self._host
        self._being_created[task_id] = record.spec
        try:
            host.contact.bind(record, renewed=True)
            if task_id in self._unreadable:
                await host.storage.set_aside(task_id)
            await host.storage.save(record)
            crash_point("task.recorded")
            self._tombstones.pop(task_id, None)
            self._unreadable.pop(task_id, None)
            host.events.add("task", task_id, str(record.state), status_of(record))
            self._start(record, is_new=is_new)
        except HostError:
            host.contact.release(task_id)
            self._capacity.cpus.forget(task_id)
            raise
        finally:
            del self._being_created[task_id]
        return status_of(record)

    async def delete(
        self,
        task_id: str,
        generation: int | None,
        epoch: int | None,
        *,
        control_plane_epoch: int | None = None,
    ) -> TaskStatus:
        """Request the removal of a task; it is removed once `get` raises `NotFound`.

        `control_plane_epoch` is the latest epoch of the control plane's requests. A task with a
        later epoch leaves a tombstone that does not prevent the control plane from starting it
        again (BUG-HT25).
        """
        loop = self._loops.get(task_id)
        if loop is None and task_id in self._unreadable:
            async with self._creating:
                if task_id in self._unreadable:
                    return await self._create(_removal_record(task_id, generation, epoch))
            return await self.delete(
                task_id, generation, epoch, control_plane_epoch=control_plane_epoch
            )
        if loop is None:
            await self._store_early_tombstone(task_id, generation, epoch)
            loop = self._loop(task_id)  # a put that was under way has created it meanwhile

        def gone(record: TaskRecord) -> TaskRecord:
            spec = self._requested_version(record, generation, epoch)
            alone = control_plane_epoch is not None and generation is None and spec.epoch == 0
            leaving = replace(record, wanted=Wanted.GONE, reason=STOP_ASKED, unversioned=alone)
            if control_plane_epoch is not None and spec.epoch > control_plane_epoch:
                spec = replace(spec, epoch=control_plane_epoch)
                leaving = replace(leaving, orphan=True)
            return to_be_stopped(replace(leaving, spec=spec), STOP_ASKED)

        return status_of(await loop.change(gone))

    async def _store_early_tombstone(
        self, task_id: str, generation: int | None, epoch: int | None
    ) -> None:
        """Store a tombstone for a delete that arrived before its put, so that it wins (F-48)."""
        if generation is None:
            return
        async with self._creating:
            known = self._tombstones.get(task_id)
            if task_id in self._loops or stale(generation, epoch or 0, known):
                return
            now = self._now()
            tombstone = Tombstone(
                task_id=task_id,
                generation=generation,
                epoch=epoch or 0,
                at=now.at,
                boot_id=now.boot_id,
                boot_s=now.boot_s,
            )
            await self._host.storage.save(tombstone)
            self._tombstones[task_id] = tombstone

    async def restart(self, task_id: str, generation: int | None, epoch: int | None) -> TaskStatus:
        """Stop a task and start it again, without back-off."""
        self._capacity.clones.check(f"task {task_id} is not restarted")
        loop = self._loop(task_id)

        if is_over(loop.record):
            await self._admission.read_host(loop.record.spec)

        def again(record: TaskRecord) -> TaskRecord:
            self._requested_version(record, generation, epoch)
            if record.wanted is Wanted.GONE:
                raise Conflict(f"task {task_id} is not restarted: it is being removed")
            if is_over(record) and (why := self._admission.capacity_refusal(task_id, record.spec)):
                hint = "stop a task, or request less"
                raise Unprocessable(f"task {task_id} is not restarted: {why}", hint=hint)
            asked = replace(record, restart_asked=True, cut_off=False, streak=0)
            return to_be_stopped(replace(asked, boot_id=self._boot_id), ASKED_AGAIN)

        return status_of(await loop.change(again))

    async def evict(self, task_id: str, why: str) -> bool:
        """End a task because the host needs its memory; False if it does not run."""
        loop = self._loops.get(task_id)
        return loop is not None and await loop.evict(why)

    async def resize(self, task_id: str, resize: Resize) -> TaskStatus:
        """Change the limits and resources of a task without a restart."""
        loop = self._loop(task_id)
        await self._capacity.cpus.refresh()
        await self._admission.read_host(resized(loop.record.spec, resize))
        image = await self._admission.read_image(loop.record.spec)

        def changed(record: TaskRecord) -> TaskRecord:
            spec = resized(record.spec, resize)
            if spec.generation > COUNT_MAX:
                raise Conflict(
                    f"task {task_id} is not resized: its generation is the highest possible",
                    hint="remove it and put it again",
                )
            self._refuse_stale(task_id, spec, record)
            if record.wanted is Wanted.GONE:
                raise Conflict(f"task {task_id} is not resized: it is being removed")
            if refused := contradiction(spec, record):
                raise Conflict(f"task {task_id} is not resized: {refused}")
            if why := resize_refusal(record.spec, resize):
                raise Unprocessable(f"task {task_id} is not resized: {why}")
            if key_of(spec) != key_of(record.spec):
                raise Unprocessable(
                    f"task {task_id} is not resized: adding its first exclusive CPUs or "
                    "huge pages, or removing the last, requires a restart",
                    hint="put it with the new resources",
                )
            self._admission.check(task_id, spec, image, "is not resized")
            return self._with_cpus(replace(record, spec=spec))

        return status_of(await self._change(loop, changed))

    def _requested_version(
        self, record: TaskRecord, generation: int | None, epoch: int | None
    ) -> TaskSpec:
        """Return the specification with the requested version; raise `Conflict` if it is stale."""
        spec = replace(
            record.spec,
            generation=record.spec.generation if generation is None else generation,
            epoch=record.spec.epoch if epoch is None else epoch,
        )
        self._refuse_stale(record.task_id, spec, record)
        return spec


def _removal_record(
    task_id: str, generation: int | None = None, epoch: int | None = None
) -> TaskRecord:
    """Return a record for the removal of a task whose specification is unknown."""
    spec = TaskSpec(
        generation=generation or 1, epoch=epoch or 0, image=_UNKNOWN_IMAGE, command=["unknown"]
    )
    return TaskRecord(
        task_id=task_id,
        spec=spec,
        wanted=Wanted.GONE,
        state=TaskState.STOPPING,
        orphan=generation is None,
    )
