"""Checks of a region at rest: no write is lost, no task is left over, all jobs run as granted.

The checks compare the control plane's answers with the tasks that run on machines.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, task_id
from control_plane.api.machines import MachineState
from control_plane.api.updates import OnFailure
from control_plane.profiles.core.rollout_steps import is_under_way
from control_plane.roles import ControlPlane
from vm_lab.region.checker import is_profile_of
from vm_lab.region.intent_checker import differences_at_rest
from vm_lab.region.machine import Copy, SimulatedMachine
from vm_lab.region.owners import expected_spec
from vm_lab.region.topology import usable_bytes
from wire.errors import NotFound, TwineError

if TYPE_CHECKING:
    from vm_lab.region.clients import OwnedJob
    from vm_lab.region.seed import SimulatedRegion


async def lost_writes(region: SimulatedRegion, control_plane: ControlPlane) -> list[str]:
    """Return acknowledged writes that the control plane does not have."""
    lost = []
    for name, owned in region.clients.jobs.items():
        if (
            owned.granted is None
            or owned.requested is None
            or not region.clients.is_acknowledged(name)
        ):
            continue
        if name in region.externally_written:
            continue
        record = await _find_record(control_plane, name)
        recorded = record.spec if record is not None else None
        wanted = expected_spec(owned, record) if record is not None else owned.granted
        if recorded != wanted and region.clients.is_acknowledged(name):
            held = "nothing"
            if recorded is not None:
                held = f"{recorded.tasks} tasks of {recorded.image[7:11]}"
            lost.append(
                f"job {name}: {owned.granted.tasks} tasks of {owned.granted.image[7:11]} were"
                f" granted at {owned.granted_at:.1f} s, and there is {held}"
            )
    stored = {
        e.record.name: e.record.spec
        for e in (await control_plane.capacity.list_entitlements()).entitlements
    }
    lost += [
        f"entitlement {name} is not as it was granted"
        for name, spec in region.clients.entitlements.items()
        if (stored_spec := stored.get(name)) is None
        or replace(stored_spec, host_profile=spec.host_profile) != spec
        or not is_profile_of(stored_spec.host_profile, spec.host_profile)
    ]
    return lost


async def unsettled(region: SimulatedRegion, control_plane: ControlPlane) -> list[str]:
    """Return all reasons why the region is not at rest."""
    if not region.clients.is_idle():
        return ["a client still waits for an answer"]
    reasons = []
    liveness = await control_plane.ready()
    if not liveness.ok or liveness.detail:
        reasons.append(f"ready says {liveness.detail}")
    try:
        records, blocked = await _check_jobs(region, control_plane, reasons)
        blocked_machines = {
            machine for task, machine in records.items() if task.rpartition("-")[0] in blocked
        }
        reasons += _unfinished_rollouts(region, control_plane, blocked_machines)
        await _check_machines(region, control_plane, reasons)
    except TwineError as e:
        return [*reasons, f"the control plane cannot be asked: {e}"]
    _check_copies(region, records, blocked, reasons)
    return reasons


def _unfinished_rollouts(
    region: SimulatedRegion, control_plane: ControlPlane, blocked_machines: set[str]
) -> list[str]:
    """Return the profile rollouts that are under way.

    A rollout may wait forever for `blocked_machines`: their tasks must stay, because the versions
    of their jobs never become healthy and have no automatic rollback.
    """
    rollouts = [control_plane.profiles.show(name).rollout for name in region.clients.entitlements]
    return [
        f"profile of {rollout.entitlement} is {rollout.state}: {rollout.reason}"
        for rollout in rollouts
        if rollout is not None
        and is_under_way(rollout)
        and not (rollout.trial and blocked_machines.issuperset(rollout.trial))
    ]


async def _check_jobs(
    region: SimulatedRegion, control_plane: ControlPlane, reasons: list[str]
) -> tuple[dict[str, str], set[str]]:
    """Check all jobs; return task → machine by their records, and jobs that cannot update."""
    placed, blocked = dict[str, str](), set[str]()
    for name, owned in region.clients.jobs.items():
        spec = owned.granted
        if owned.requested is None or spec is None:
            if await _find_record(control_plane, name) is not None:
                reasons.append(f"job {name} was stopped and is still there")
            continue
        status = await control_plane.get_job(name)
        expected_spec(owned, status.record)
        for task in status.record.tasks:
            if task.placement is not None:
                placed[task_id(name, task.index)] = task.placement.machine
        if status.record.spec.image in region.machine_context.bad_images:
            if not may_stay_unhealthy(status.record):
                reasons.append(f"job {name} runs a version that never gets healthy")
            blocked.add(name)
            continue
        listed = {e.task: e.machine for e in (await control_plane.endpoints(name)).endpoints}
        if _runs_as_far_as_room_allows(region, status, len(listed)):
            if is_update_blocked(status):
                blocked.add(name)
            continue
        if _is_held_up_in_transfer(region, status, len(listed)):
            blocked.add(name)
            continue
        if status.phase is not JobPhase.STABLE:
            reasons.append(f"job {name} is {status.phase}: {status.detail}")
        reasons += differences_at_rest(
            owned, status, _running_images(region, name), region.timeline.now
        )
        if len(listed) != spec.tasks:  # which indexes stay is the scheduler's choice
            reasons.append(f"job {name} lists {len(listed)} of {spec.tasks} tasks")
    return placed, blocked


def _running_images(region: SimulatedRegion, job: str) -> Counter[str]:
    """Return how many copies of a job run each image."""
    copies = (c for machine in region.machines.values() for c in machine.copies.values())
    return Counter(
        c.running_image for c in copies if c.alive and c.task_id.rpartition("-")[0] == job
    )


def _runs_as_far_as_room_allows(region: SimulatedRegion, status: JobStatus, listed: int) -> bool:
    """Return whether all tasks run except those that wait for room in a full entitlement."""
    tasks = [task for task in status.record.tasks if not task.extra]
    placed = sum(1 for task in tasks if task.placement is not None)
    return (
        placed < len(tasks) == status.wanted
        and placed == listed == status.healthy
        and (placed == status.updated or is_update_blocked(status))
        and is_full(region, status.record.spec)
    )


def _is_held_up_in_transfer(region: SimulatedRegion, status: JobStatus, listed: int) -> bool:
    """Return whether all tasks serve, and some cannot follow the job to a full entitlement.

    A story may move a job to an entitlement without room for all its tasks. An extra task with a
    placement could replace one of them, so there must be none.
    """
    record = status.record
    tasks = [task for task in record.tasks if not task.extra]
    left = [task for task in tasks if task.version != record.version]
    return (
        bool(left)
        and len(tasks) == status.wanted == listed == status.healthy
        and all(record.specs[t.version].entitlement != record.spec.entitlement for t in left)
        and not any(task.extra and task.placement is not None for task in record.tasks)
        and is_full(region, record.spec)
    )


def may_stay_unhealthy(record: JobRecord) -> bool:
    """Return whether a job may stay with a version that never becomes healthy.

    It has no automatic rollback, or no version to roll back to. Its tasks need not serve;
    everything else must come to rest.
    """
    rollout = record.rollout
    return (
        record.spec.update.on_failure is not OnFailure.ROLLBACK
        or rollout is None
        or rollout.halted
        or rollout.returns_from > 0
    )


def is_update_blocked(status: JobStatus) -> bool:
    """Return whether the tasks that wait for room use up the job's availability budget.

    A release has to wait then: the owner requested more tasks than there is room for, and allows
    at most `max_unavailable` unavailable tasks.
    """
    record = status.record
    waiting = sum(1 for task in record.tasks if task.placement is None)
    return waiting >= record.spec.update.max_unavailable


def is_full(region: SimulatedRegion, spec: JobSpec) -> bool:
    """Return whether an entitlement holds its quota and no machine of it has room for a task.

    A story may request more than was granted, or tasks that fit only if tasks of other jobs move,
    which is not promised. The tasks that run on the machines decide.
    """
    quota = region.clients.entitlements[spec.entitlement].machines
    checked = region.checker.machines
    own = [
        m for name, m in region.machines.items() if checked[name].entitlement == spec.entitlement
    ]
    return quota is not None and len(own) >= quota and not any(_has_room(m, spec) for m in own)


def _has_room(machine: SimulatedMachine, spec: JobSpec) -> bool:
    wanted = [spec.limits, *(copy.spec.limits for copy in machine.copies.values() if copy.wanted)]
    memory = sum(limits.memory_max_bytes for limits in wanted)
    cores = sum(round((limits.cpu_max_cores or 0.0) * 1000) for limits in wanted)
    return memory <= usable_bytes(machine.memory_bytes) and cores <= machine.cpus * 1000


async def _check_machines(
    region: SimulatedRegion, control_plane: ControlPlane, reasons: list[str]
) -> None:
    for view in (await control_plane.list_machines()).machines:
        record = view.record
        if record.state is not MachineState.UP:
            reasons.append(f"machine {record.machine} is {record.state} and answers")
        elif not view.ready:
            reasons.append(f"machine {record.machine} is not ready")
        if record.hold is not None:
            reasons.append(f"machine {record.machine} is held for {record.hold.transaction}")
        copies = region.machines[record.machine].copies
        if copies and not record.entitlement:
            reasons.append(f"machine {record.machine} is free and has {', '.join(sorted(copies))}")


def _check_copies(
    region: SimulatedRegion, placed: dict[str, str], blocked: set[str], reasons: list[str]
) -> None:
    """Compare the running tasks with the records; jobs of `blocked` cannot update."""
    running: dict[str, list[str]] = {}
    for machine in region.machines.values():
        for task, copy in machine.copies.items():
            running.setdefault(task, []).append(machine.name)
            job = copy.spec.job or task.rpartition("-")[0]
            owned = region.clients.jobs.get(job)  # None: a job of best-effort work
            if owned is not None and job not in blocked and _runs_older_image(copy, owned):
                reasons.append(f"{task} on {machine.name} runs an older image")
            if not copy.alive:
                reasons.append(f"{task} on {machine.name} is {copy.state}")
    for task in sorted(running.keys() | placed.keys()):
        where = sorted(running.get(task, []))
        if where != [placed[task]] if task in placed else where:
            reasons.append(
                f"{task} is recorded on {placed.get(task, 'no machine')} and there on"
                f" {', '.join(where) or 'none'}"
            )


def _runs_older_image(copy: Copy, owned: OwnedJob) -> bool:
    return (
        copy.alive
        and owned.granted is not None
        and not owned.intents
        and copy.running_image != owned.expected_image
    )


async def _find_record(control_plane: ControlPlane, name: str) -> JobRecord | None:
    try:
        return (await control_plane.get_job(name)).record
    except NotFound:
        return None
