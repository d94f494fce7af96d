"""Job control: what owners want, checked as a whole and then written into the job's record."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

from msgspec.structs import replace

from agent.api import ImageInfo
from agent.api.volumes import VolumeKind
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.autoscale import AutoscaleMode, SizeWish, starting_size
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.settings import SchedulerSettings
from control_plane.api.stored_jobs import RetiredJob
from control_plane.errors import QuotaExceeded
from control_plane.images.store import FindImage
from control_plane.images.trust import distrust_in
from control_plane.portal.core.pools import pool_of
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.job_check import (
    check_job,
    check_named,
    check_neighbours,
    check_trust,
    claiming,
    same_tasks,
)
from control_plane.scheduler.core.owner_moves import with_move, with_restart
from control_plane.scheduler.core.release import back_to, resumed, returned
from control_plane.scheduler.core.rollout import earlier
from control_plane.scheduler.core.shares import check_share, is_shared
from control_plane.scheduler.event_log import retired_job
from control_plane.scheduler.ports import Entitlements
from control_plane.store import Put
from control_plane.store.records import USES
from wire.errors import Conflict, InvalidInput, NotFound

log = logging.getLogger(__name__)
STAYING = (VolumeKind.PERSISTENT, VolumeKind.SHARED)
"""Volumes whose content is on the machines of one entitlement."""


class JobControl:
    """The only writer of what is wanted; the scheduler writes how it stands."""

    def __init__(
        self,
        runtime: Runtime,
        jobs: Table[JobRecord],
        portal: Entitlements,
        find_image: FindImage,
        index: RegionIndex,
        default_cpus: float = SchedulerSettings().default_cpu_cores,
    ) -> None:
        """Do nothing yet; `default_cpus` is claimed where a job says nothing about CPU."""
        self._default_cpus = default_cpus
        self._jobs, self._portal = jobs, portal
        self._index = index
        self._runtime = runtime
        self._store = jobs.store
        self._find_image = find_image
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By entitlement: two jobs that fit its quota alone may not fit it together."""
        self.skipped_generations = 0
        """Of new jobs: what an earlier one of the name may have had that nobody knows of."""

    async def apply(
        self, spec: JobSpec, *, dry_run: bool, back_to: int = 0, moves: bool = False
    ) -> JobRecord:
        """Create the job or change what is wanted of it; with all its errors, or not at all.

        With `dry_run` the record that would be stored is returned and nothing is. `back_to` is
        the version that wanted it before, if it is to go back. Only if it `moves`, or goes back,
        may it come to another entitlement.
        """
        if spec.name in self._jobs.set_aside:
            raise Conflict(
                f"cannot apply job {spec.name!r}: its stored record is damaged and was set aside;"
                " its tasks run on",
                hint="restore it, or drop it: twine-control-plane check-store --forget"
                f" jobs/{spec.name}",
            )
        image = await self._find_image(spec.image)
        written = spec
        spec = self._claiming(written)
        moves = moves or back_to > 0
        self._check(_at_most(spec, written.tasks), image, moves=moves)
        async with self._turn(spec.entitlement), self._jobs.lock(spec.name):
            known, retired = self._jobs.find(spec.name), RetiredJob()
            if known is None:
                retired = await retired_job(self._store, spec.name)
            spec = self._claiming(written)
            self._check(_at_most(spec, written.tasks), image, moves=moves)  # others may be faster
            self._check_share(spec, known)
            if known is None:
                record = self._new(spec, retired)
            elif back_to:
                reason = f"its owner wants version {back_to} again instead of {known.version}"
                record = returned(_going_on(known), spec, reason)
            else:
                record = _changed(known, spec)
            if not dry_run and record != known:
                compare = self._portal.table.expect([spec.entitlement])
                comes = known is None or known.spec.entitlement != spec.entitlement
                also = [Put(USES + spec.entitlement, b"{}")] if comes else []
                with self._portal.applying(spec.entitlement):
                    await self._jobs.commit(spec.name, record, compare, also)
                log.info("job applied", extra={"job": spec.name, "version": record.version})
        return record

    def _check(self, spec: JobSpec, image: ImageInfo | None, *, moves: bool) -> None:
        entitlements = {r.name: r.spec for r in self._portal.table.records()}
        errors = check_job(
            spec,
            entitlements=entitlements,
            image_known=image is not None,
            machines=self._index.kinds(),
            known=self._jobs.find(spec.name),
            moves=moves,
        )
        errors = (*errors, *check_neighbours(spec, self._jobs.find))
        errors = (*errors, *check_trust(image, entitlements.get(spec.entitlement)))
        if moves:
            errors = (*errors, *check_named(spec, self._jobs.values()))
        if errors:
            count = f"{len(errors)} error{'s' if len(errors) > 1 else ''}"
            listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
            raise InvalidInput(f"cannot apply job {spec.name!r}, {count}: {listed}", errors=errors)

    def _claiming(self, spec: JobSpec) -> JobSpec:
        """Return the specification with its CPU claim, and the size that its file leaves open."""
        record = self._jobs.find(spec.name)
        known = record.spec if record is not None else None
        sized = replace(spec, tasks=starting_size(spec.autoscale, spec.tasks, _autoscaled(known)))
        return claiming(sized, known, self._default_cpus)

    def _turn(self, entitlement: str) -> AbstractAsyncContextManager[object]:
        """Return what is held from the check of an entitlement's share to the write."""
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
            known = None  # what it had was another quota's
        errors = check_share(spec, known, others, specs, self._index.kinds())
        if errors:
            listed = "; ".join(error.reason for error in errors)
            raise QuotaExceeded(
                f"cannot apply job {spec.name!r}: {listed}",
                hint=f"twinectl entitlement update {spec.entitlement}, or stop another job in it",
                errors=tuple(errors),
            )

    async def distrust(self, spec: JobSpec) -> str:
        """Return why no task of a job may be started from its image, empty where one may."""
        entitlement = self._portal.specs().get(spec.entitlement)
        keys = [] if entitlement is None else entitlement.image_keys
        return await distrust_in(self._find_image, spec.image, keys)

    def users_of_image(self, digest: str) -> list[str]:
        """Return the jobs of which a version has this image that is wanted, runs, or is kept to go
        back to.
        """
        return sorted(
            record.name
            for record in self._jobs.values()
            if any(spec.image == digest for spec in (record.spec, *record.specs.values()))
        )

    async def stop(self, name: str) -> JobRecord:
        """Ask for all tasks of a job to be stopped and the job to be forgotten."""
        record = await self._jobs.update(name, lambda r: replace(r, stopping=True))
        log.info("job stopping", extra={"job": name})
        return record

    async def resize(self, name: str, wish: SizeWish) -> JobRecord:
        """Change the size of a job and nothing else, if size and version are those that were seen.

        Raises `Conflict` if they are not, `QuotaExceeded` if the entitlement has no room.
        """
        record = _going_on(self._jobs.get(name))
        async with self._turn(record.spec.entitlement), self._jobs.lock(name):
            record = _going_on(self._jobs.get(name))
            _check_resize(record, wish)
            spec = replace(record.spec, tasks=wish.tasks)
            self._check_share(spec, record)
            after = _changed(record, spec)
            if after != record:
                compare = self._portal.table.expect([spec.entitlement])
                with self._portal.applying(spec.entitlement):
                    await self._jobs.commit(name, after, compare)
                log.info(
                    "job resized",
                    extra={"job": name, "tasks": wish.tasks, "was": wish.was, "why": wish.reason},
                )
        return after

    async def pause(self, name: str, *, paused: bool) -> JobRecord:
        """Hold back what tasks would be taken down for because of a newer version, or go on."""
        record = await self._jobs.update(name, lambda r: _paused(_going_on(r), paused))
        log.info("job paused" if paused else "job resumed", extra={"job": name})
        return record

    async def restart(self, name: str) -> JobRecord:
        """Have every task started anew as it is, like an update: within the budget, and asked."""
        record = await self._jobs.update(name, lambda r: _again(_going_on(r)))
        log.info("job restarts", extra={"job": name, "version": record.version})
        return record

    async def move_task(self, name: str, index: int, to: str, reason: str) -> JobRecord:
        """Have a task run elsewhere, within the budget of its job like any operation."""
        machine = self._index.machines.get(to) if to else None
        record = _going_on(self._jobs.get(name))
        if to and machine is None:
            raise NotFound(f"there is no machine {to!r} that could take tasks")
        specs = self._portal.specs()
        pool = pool_of(record.spec.entitlement, specs[record.spec.entitlement])
        if machine is not None and machine.pool != pool:
            raise Conflict(
                f"task {name}-{index} cannot move to {to}: that is not {pool!r}'s",
                hint=f"twinectl machine list --entitlement {pool}",
            )
        now = Moment(self._runtime.date(), self._runtime.now())
        record = await self._jobs.update(
            name, lambda r: with_move(_going_on(r), index, to, reason, now)
        )
        log.info("task is to move", extra={"job": name, "task": index, "machine": to})
        return record

    async def move(self, name: str, entitlement: str) -> JobRecord:
        """Have a job run in another entitlement, a transfer: an update that starts tasks there.

        What is placed anew from now on is placed there; what runs stays until its turn comes.
        """
        record = _going_on(self._jobs.get(name))
        if record.spec.entitlement == entitlement:
            raise Conflict(
                f"cannot move job {name!r}: it is in entitlement {entitlement!r} already",
                hint=f"twinectl job status {name}",
            )
        kept = [n for n, volume in record.spec.volumes.items() if volume.kind in STAYING]
        if kept:
            raise Conflict(
                f"cannot move job {name!r}: what is in {', '.join(kept)} stays on the machines of"
                f" entitlement {record.spec.entitlement!r}",
                hint="apply the job without these volumes first, if their content may be left",
            )
        moved = replace(record.spec, entitlement=entitlement)
        return await self.apply(moved, dry_run=False, moves=True)

    async def restart_task(self, name: str, index: int, reason: str) -> JobRecord:
        """Have a task start anew where it is, within the budget of its job like any operation."""
        now = Moment(self._runtime.date(), self._runtime.now())
        record = await self._jobs.update(
            name, lambda r: with_restart(_going_on(r), index, reason, now)
        )
        log.info("task is to restart", extra={"job": name, "task": index})
        return record

    async def rollback(self, name: str) -> JobRecord:
        """Want again of the tasks what the version before wanted, as a new version."""
        record = _going_on(self._jobs.get(name))
        version = earlier(record)
        if version is None:
            raise Conflict(
                f"cannot roll back job {name!r}: no earlier version of it is known",
                hint="apply the file that you want",
            )
        spec = back_to(record.spec, record.specs[version])
        return await self.apply(spec, dry_run=False, back_to=version)

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


def _going_on(record: JobRecord) -> JobRecord:
    """Return the record, or refuse to change a job that is being stopped."""
    if record.stopping:
        raise Conflict(f"job {record.name!r} is being stopped")
    return record


def _at_most(spec: JobSpec, tasks: int) -> JobSpec:
    """Return the specification with so many tasks at most.

    What the autoscaler wants beyond the room of an entitlement waits; it stops no release (AS5).
    """
    return replace(spec, tasks=min(spec.tasks, tasks))


def _autoscaled(spec: JobSpec | None) -> int | None:
    """Return the size that the autoscaler answers for; None: it does not."""
    policy = spec.autoscale if spec is not None else None
    is_set = policy is not None and policy.mode is AutoscaleMode.APPLY
    return spec.tasks if spec is not None and is_set else None


def _check_resize(record: JobRecord, wish: SizeWish) -> None:
    """Raise `Conflict` if the job is not as it was seen, or leaves its size to its owner."""
    name, spec, policy = record.name, record.spec, record.spec.autoscale
    if (spec.tasks, record.version) != (wish.was, wish.version):
        raise Conflict(
            f"cannot resize job {name!r} from {wish.was} tasks at version {wish.version}: it has"
            f" {spec.tasks} at version {record.version}",
            hint="read the job again",
        )
    if policy is None or policy.mode is not AutoscaleMode.APPLY:
        raise Conflict(
            f"cannot resize job {name!r}: its autoscale.mode is not apply",
            hint=f"apply its file with tasks = {wish.tasks}",
        )
    if not policy.minimum <= wish.tasks <= policy.maximum:
        raise Conflict(
            f"cannot resize job {name!r} to {wish.tasks} tasks: its bounds are {policy.minimum}"
            f" to {policy.maximum}",
            hint="read the job again",
        )


def _again(record: JobRecord) -> JobRecord:
    version = record.version + 1
    return replace(record, version=version, specs=record.specs | {version: record.spec})


def _paused(record: JobRecord, paused: bool) -> JobRecord:
    """Return the record held back, or going on: then what halted it is forgiven, too."""
    return replace(record if paused else resumed(record), paused=paused)


def _changed(record: JobRecord, spec: JobSpec) -> JobRecord:
    """Return the record with what is wanted now; only what tasks run makes a new version."""
    if record.stopping:
        raise Conflict(
            f"cannot apply job {record.name!r}: it is being stopped",
            hint="wait until `twinectl job status` does not list it any more",
        )
    if same_tasks(record.spec, spec):
        specs = record.specs | {record.version: spec}
        return replace(record, spec=spec, specs=specs)
    version = record.version + 1
    return replace(record, spec=spec, version=version, specs=record.specs | {version: spec})
