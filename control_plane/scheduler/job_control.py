"""Job control: checks an owner's change as a whole, then writes it into the job's record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from agent.api import ImageInfo
from agent.api.volumes import VolumeKind
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.intent_changes import IntentChange
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.settings import SchedulerSettings
from control_plane.api.stored_jobs import RetiredJob
from control_plane.images.store import FindImage
from control_plane.images.trust import distrust_reason
from control_plane.portal.core.pools import pool_of
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.job_change import (
    JobChange,
    apply_change,
    move_change,
    paused,
    require_not_stopping,
    restarted,
    rollback_change,
    with_intent,
)
from control_plane.scheduler.core.job_check import (
    check_job,
    check_named,
    check_neighbours,
    check_quota,
    check_trust,
    claiming,
)
from control_plane.scheduler.core.owner_moves import with_move, with_restart
from control_plane.scheduler.core.rollout import earlier
from control_plane.scheduler.core.shares import check_share, is_shared
from control_plane.scheduler.event_log import retired_job
from control_plane.scheduler.ports import Entitlements
from control_plane.store import Operation, Put
from control_plane.store.records import USES
from wire.errors import Conflict, InvalidInput, NotFound, QuotaExceeded

log = logging.getLogger(__name__)
STAYING = (VolumeKind.PERSISTENT, VolumeKind.SHARED)
"""Volumes whose content is on the machines of one entitlement."""


class JobControl:
    """The only writer of the desired state of jobs; the scheduler writes their observed state."""

    def __init__(
        self,
        runtime: Runtime,
        jobs: Table[JobRecord],
        portal: Entitlements,
        find_image: FindImage,
        index: RegionIndex,
        default_cpus: float = SchedulerSettings().default_cpu_cores,
    ) -> None:
        """`default_cpus` is the CPU claim of a job that specifies none."""
        self._default_cpus = default_cpus
        self._jobs, self._portal = jobs, portal
        self._index = index
        self._runtime = runtime
        self._store = jobs.store
        self._find_image = find_image
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Lock by entitlement: two jobs that fit its quota alone may not fit it together."""
        self.skipped_generations = 0
        """Generations that a new job skips: an earlier job of its name may have used them."""
        self.in_one_shard: Callable[[str, str], Mapping[str, int]] = lambda _job, _entitlement: {}
        """Returns comparisons that hold while a job and an entitlement share a shard."""

    async def apply(
        self, spec: JobSpec, *, dry_run: bool, writer: str = "", is_new: bool = False
    ) -> JobRecord:
        """Create the job or change it: writes its push and its size.

        Raises one error that lists all faults. With `dry_run` it returns the record without storing
        it. With `is_new` an existing job is a `Conflict`.
        """
        change = apply_change(spec, writer, self._runtime.date(), is_new=is_new)
        return await self.write(change, dry_run=dry_run)

    async def write(
        self, change: JobChange, *, dry_run: bool = False, also: Sequence[Operation] = ()
    ) -> JobRecord:
        """Check a change under the lock of its job, and store the resulting record.

        `also` is written in the same transaction, even if the record does not change.
        """
        name = change.job
        if name in self._jobs.set_aside:
            raise Conflict(
                f"cannot apply job {name!r}: its stored record is damaged and was set aside; its "
                "tasks continue to run",
                hint="restore the record, or drop it: twine-control-plane check-store --forget "
                f"jobs/{name}",
            )
        before = self._checked(change, self._jobs.find(name))
        image = None if change.is_resize else await self._find_image(before.image)
        async with self._turn(before.entitlement), self._jobs.lock(name):
            known = self._jobs.find(name)
            retired = RetiredJob() if known else await retired_job(self._store, name)
            spec = self._checked(change, known)
            is_other_image = spec.image != before.image and not change.is_resize
            if is_other_image or spec.entitlement != before.entitlement:
                raise Conflict(
                    f"job {name!r} was changed by another request", hint="write it again"
                )
            if not change.is_resize:
                self._check(change.fitting(spec), image, moves=change.moves)
            self._check_share(spec, known)
            record = change.record(known or self._new(spec, retired), spec)
            if not dry_run and (also or record != known):
                compare = self._portal.table.expect([spec.entitlement])
                if known is not None and known.spec.entitlement != spec.entitlement:
                    compare |= self.in_one_shard(name, spec.entitlement)
                comes = known is None or known.spec.entitlement != spec.entitlement
                uses = [Put(USES + spec.entitlement, b"{}")] if comes else []
                with self._portal.applying(spec.entitlement):
                    await self._jobs.commit(name, record, compare, [*uses, *also])
                level = logging.DEBUG if change.is_resize else logging.INFO
                log.log(level, "job applied", extra={"job": name, "version": record.version})
        return record

    def _check(self, spec: JobSpec, image: ImageInfo | None, *, moves: bool) -> None:
        entitlements, machines = self._portal.specs(), self._index.kinds()
        entitlement = entitlements.get(spec.entitlement)
        errors = check_job(
            spec,
            entitlements=entitlements,
            image_known=image is not None,
            machines=machines,
            known=self._jobs.find(spec.name),
            moves=moves,
        )
        errors += check_neighbours(spec, self._jobs.find)
        errors += check_trust(image, entitlement)
        errors += check_named(spec, self._jobs.values()) if moves else ()
        kind = InvalidInput if errors else QuotaExceeded
        errors += check_quota(spec, entitlement, machines)
        if errors:
            count = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
            listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
            raise kind(f"cannot apply job {spec.name!r}, {count}: {listed}", errors=tuple(errors))

    def _checked(self, change: JobChange, known: JobRecord | None) -> JobSpec:
        """Return the specification of a change, with the CPU claim of its tasks filled in."""
        spec = change.spec(known)
        if change.is_resize:
            return spec
        return claiming(spec, known.spec if known is not None else None, self._default_cpus)

    def _turn(self, entitlement: str) -> AbstractAsyncContextManager[object]:
        """Return the lock that is held from the check of an entitlement's share to the write."""
        if not is_shared(entitlement, self._portal.specs()):
            return nullcontext()
        turn = self._turns.get(entitlement)
        if turn is None:
            turn = self._turns[entitlement] = asyncio.Lock()
        return turn

    def _check_share(self, spec: JobSpec, known: JobRecord | None) -> None:
        """Refuse a job that wants more than its entitlement's other jobs leave (MO16)."""
        specs = self._portal.specs()
        if not is_shared(spec.entitlement, specs):
            return
        others = [
            record
            for record in self._jobs.values()
            if record.spec.entitlement == spec.entitlement and record.name != spec.name
        ]
        if known is not None and known.spec.entitlement != spec.entitlement:
            known = None  # its present claims count against another quota
        errors = check_share(spec, known, others, specs, self._index.kinds())
        if errors:
            listed = "; ".join(error.reason for error in errors)
            raise QuotaExceeded(
                f"cannot apply job {spec.name!r}: {listed}",
                hint=f"twinectl entitlement update {spec.entitlement}, or stop another job in it",
                errors=tuple(errors),
            )

    async def distrust(self, spec: JobSpec) -> str:
        """Return why no task of a job may start from its image; empty: tasks may start."""
        entitlement = self._portal.specs().get(spec.entitlement)
        keys = [] if entitlement is None else entitlement.image_keys
        return await distrust_reason(self._find_image, spec.image, keys)

    def users_of_image(self, digest: str) -> list[str]:
        """Return the jobs with a version of this image: wanted, running, or kept for rollback."""
        return sorted(
            record.name
            for record in self._jobs.values()
            if any(spec.image == digest for spec in (record.spec, *record.specs.values()))
        )

    async def stop(self, name: str) -> JobRecord:
        """Mark a job as stopping: its tasks are stopped, and then it is deleted."""
        record = await self._jobs.update(name, lambda r: replace(r, stopping=True))
        log.info("job stopping", extra={"job": name})
        return record

    async def pause(self, name: str, *, held_back: bool, expect: int | None = None) -> JobRecord:
        """Pause operations that stop tasks for a newer version, or resume them.

        `expect`: only if the job is at this version.
        """
        record = await self._jobs.update(
            name, lambda r: paused(r, held_back=held_back, expect=expect)
        )
        log.info("job paused" if held_back else "job resumed", extra={"job": name})
        return record

    async def restart(self, name: str, writer: str = "", expect: int | None = None) -> JobRecord:
        """Restart every task unchanged, like an update: within the budget, after approval.

        `expect`: only if the job is at this version.
        """
        now = self._runtime.date()
        record = await self._jobs.update(name, lambda r: restarted(r, writer, now, expect))
        log.info("restart of a job recorded", extra={"job": name, "version": record.version})
        return record

    async def note(
        self,
        name: str,
        dimension: Dimension,
        value: Struct | None,
        change: IntentChange,
        writer: str,
        lasts_s: float | None = None,
    ) -> JobRecord:
        """Write an intent that changes no specification; `None` withdraws it."""
        now = self._runtime.date()
        record = await self._jobs.update(
            name, lambda r: with_intent(r, dimension, value, change, writer, now, lasts_s)
        )
        log.info("intent written", extra={"job": name, "dimension": dimension.value})
        return record

    async def move_task(self, name: str, index: int, to: str, reason: str) -> JobRecord:
        """Add the move of a task to its operations; the job's budget applies."""
        machine = self._index.machines.get(to) if to else None
        record = require_not_stopping(self._jobs.get(name))
        if to and machine is None:
            raise NotFound(f"there is no machine {to!r} that could take tasks")
        specs = self._portal.specs()
        pool = pool_of(record.spec.entitlement, specs[record.spec.entitlement])
        if machine is not None and machine.pool != pool:
            raise Conflict(
                f"task {name}-{index} cannot move to {to}: the machine does not belong to {pool!r}",
                hint=f"twinectl machine list --entitlement {pool}",
            )
        now = Moment(self._runtime.date(), self._runtime.now())
        record = await self._jobs.update(
            name, lambda r: with_move(require_not_stopping(r), index, to, reason, now)
        )
        log.info("move of a task recorded", extra={"job": name, "task": index, "machine": to})
        return record

    async def move(self, name: str, entitlement: str, writer: str = "") -> JobRecord:
        """Transfer a job to another entitlement: an update that starts tasks there.

        New placements are made there; running tasks stay until their turn in the update.
        """
        record = require_not_stopping(self._jobs.get(name))
        if record.spec.entitlement == entitlement:
            raise Conflict(
                f"cannot move job {name!r}: it is already in entitlement {entitlement!r}",
                hint=f"twinectl job status {name}",
            )
        kept = [n for n, volume in record.spec.volumes.items() if volume.kind in STAYING]
        if kept:
            raise Conflict(
                f"cannot move job {name!r}: its volumes {', '.join(kept)} stay on the machines "
                f"of entitlement {record.spec.entitlement!r}",
                hint="apply the job without these volumes first, if their content may be lost",
            )
        return await self.write(move_change(name, entitlement, writer, self._runtime.date()))

    async def restart_task(self, name: str, index: int, reason: str) -> JobRecord:
        """Add a restart of a task on its machine; the job's budget applies."""
        now = Moment(self._runtime.date(), self._runtime.now())
        record = await self._jobs.update(
            name, lambda r: with_restart(require_not_stopping(r), index, reason, now)
        )
        log.info("restart of a task recorded", extra={"job": name, "task": index})
        return record

    async def rollback(self, name: str, writer: str = "", expect: int | None = None) -> JobRecord:
        """Apply the previous version's specification again, as a new version.

        `expect`: only if the job is at this version, so that a request sent twice goes back once.
        """
        record = require_not_stopping(self._jobs.get(name))
        version = earlier(record)
        if version is None:
            raise Conflict(
                f"cannot roll back job {name!r}: no earlier version of it is known",
                hint="apply the file that you want",
            )
        return await self.write(
            rollback_change(name, version, writer, self._runtime.date(), expect)
        )

    def _new(self, spec: JobSpec, retired: RetiredJob) -> JobRecord:
        return JobRecord(
            name=spec.name,
            spec=spec,
            version=1,
            specs={1: spec},
            created_at=self._runtime.date(),
            generation=retired.generation + self.skipped_generations,
            numbered=retired.asked,
            leaving=retired.leaving,
            lasting=retired.lasting,
        )
