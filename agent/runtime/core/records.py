"""What the agent remembers of a task between two moments, on disk and off it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from agent.api import (
    ROOT_MAX_BYTES,
    UMASK,
    Exit,
    Health,
    Limits,
    Network,
    OomPolicy,
    Relaxation,
    Resources,
    TaskSpec,
    TaskState,
    TaskStatus,
    Ulimits,
    Volume,
    VolumeKind,
)
from wire.cpus import listed


class Wanted(StrEnum):
    """What the owner of a task asked for last."""

    RUN = "run"
    GONE = "gone"


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One task: the owner's intent, and what was last seen of it.

    The first four fields are the intent and must never be lost. The rest is a cache of what
    systemd and btrfs say, kept so that an end that happened unseen is counted
    once and so that health survives a restart of the agent.
    """

    schema: int = 1
    task_id: str
    spec: TaskSpec
    wanted: Wanted = Wanted.RUN
    restart_asked: bool = False
    state: TaskState = TaskState.ACCEPTED
    reason: str = ""
    health: Health = Health.UNKNOWN
    invocation_id: str = ""
    boot_id: str = ""
    """Boot of the host in which its owner last spoke up or its unit was last seen."""
    ended_invocation: str = ""
    """Invocation whose end is already counted."""
    started_at: float | None = None
    started_boot_s: float | None = None
    """Seconds since boot when it was first seen running; its back-off depends on it."""
    next_start_at: float | None = None
    """For people; the clock may be stepped, so `next_start_boot_s` decides."""
    next_start_boot_s: float | None = None
    """Seconds since boot, suspend included."""
    restarts: int = 0
    streak: int = 0
    """Restarts since it last ran for long; sets the back-off."""
    last_exit: Exit | None = None
    limits: Limits | None = None
    """Limits that the running unit has."""
    resources: Resources | None = None
    """Likewise; None: those of `Resources()`, which an earlier agent knew only."""
    volumes: dict[str, Volume] | None = None
    """Likewise, with the limits that they have; None: none."""
    own_cpus: list[int] = []
    """That its machine chose for it alone; kept while it is stopped, too, as its memory is."""
    ids: int | None = None
    """First of the users of its machine, where it has an init of its own (tasks.core.own_init)."""
    addresses: list[str] = []
    """Addresses in its private network, IPv6 first; none in the host's."""
    cut_off: bool = False
    """It was ended for lost contact to its control plane; only a command starts it again."""
    started_up: str = ""
    """Invocation whose startup probe succeeded."""
    previous: TaskSpec | None = None
    """What served before the generation that has to prove itself now (`tasks.core.gate`)."""
    gate_boot_s: float | None = None
    """Seconds since boot until when it has to be healthy; None while the old version still runs."""
    gone_back: str = ""
    """Why the generation in force is not the one asked for last."""
    orphan: bool = False
    """It was found on the host and no specification is known: it is only being removed."""


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was removed: what arrives late for it must not bring it back."""

    task_id: str
    generation: int
    epoch: int
    at: float


def key_of(spec: TaskSpec) -> str:
    """Return a name for what the process is made from: 12 hexadecimal digits.

    Two specifications with the same key can run in the same unit; what differs (limits,
    probe, restart policy) is applied to it live.
    """
    process: tuple[object, ...] = (
        spec.image,
        spec.command,
        sorted(spec.environment.items()),
        spec.entitlement,
        spec.stop_timeout_s,
    )
    # What a unit of an earlier release cannot have is only named where it is asked for, so that
    # the keys of units that run stay as they are.
    if spec.network != Network():
        process += (("network", _sorted(spec.network)),)
    if spec.life.init or spec.life.max_run_s is not None:
        process += (("life", [_sorted(step) for step in spec.life.init], spec.life.max_run_s),)
    if spec.life.notice is not None:
        process += (("notice",),)  # the address and the kinds of its hook are no part of the unit
    if spec.volumes:
        process += (("volumes", volumes_in_key(spec)),)
    if spec.resources.exclusive_cpus:
        process += (("own CPUs",),)  # the slice is another one
    if spec.resources.hugepages_2mib or spec.resources.hugepages_1gib:
        process += (("huge pages",),)
    if spec.credentials:
        process += (("credentials", sorted(spec.credentials.items())),)
    if spec.configuration:
        process += (("configuration", sorted(spec.configuration.items())),)
    if spec.relaxations:
        process += (("relaxations", sorted({*spec.relaxations})),)
    if spec.ulimits != Ulimits():
        process += (("ulimits", _sorted(spec.ulimits)),)
    if int(spec.umask, 8) != int(UMASK, 8):
        process += (("umask", int(spec.umask, 8)),)
    if spec.oom is not OomPolicy.TASK:
        process += (("oom", spec.oom),)
    if spec.stdout is not None:
        process += (("stdout", spec.stdout),)
    if spec.root is not None or spec.root_max_bytes != ROOT_MAX_BYTES:
        process += (("root", spec.root, spec.root_max_bytes),)
    if spec.identity:
        process += (("identity", True),)
    return hashlib.sha256(msgspec.json.encode(process)).hexdigest()[:12]


def volumes_in_key(spec: TaskSpec) -> object:
    """Return what a unit has of its volumes; limits of those on disk change while it runs."""
    return [
        (n, _sorted(v if v.kind is VolumeKind.TMPFS else replace(v, max_bytes=None)))
        for n, v in sorted(spec.volumes.items())
    ]


def is_up(task: TaskRecord) -> bool:
    """Return whether a running task is past its startup probe, if it has one."""
    return task.spec.life.startup is None or task.started_up == task.invocation_id


def has_own_init(spec: TaskSpec) -> bool:
    """Return whether a task has an init of its own."""
    return Relaxation.OWN_INIT in spec.relaxations


def user_of(task_id: str) -> str:
    """Return the dynamic user of a task, shared by all that runs for it; at most 31 characters."""
    return "twine-" + hashlib.sha256(task_id.encode()).hexdigest()[:20]


def _sorted(value: msgspec.Struct) -> object:
    return msgspec.to_builtins(value, order="sorted")


TASK_UNITS = "twine-task-*.service"
"""The units of all tasks, as a glob."""


def unit_of(task_id: str) -> str:
    """Return the unit's name; ids are DNS labels, so nothing needs escaping."""
    return f"twine-task-{task_id}.service"


def task_of(unit: str) -> str:
    """Return the id of the task that a unit belongs to: the reverse of `unit_of`."""
    return unit.removeprefix("twine-task-").removesuffix(".service")


def status_of(task: TaskRecord) -> TaskStatus:
    """Return what the API shows of a task."""
    return TaskStatus(
        task_id=task.task_id,
        generation=task.spec.generation,
        epoch=task.spec.epoch,
        state=task.state,
        health=task.health,
        reason=task.reason or task.gone_back,
        image=task.spec.image,
        entitlement=task.spec.entitlement,
        job=task.spec.job,
        unit=unit_of(task.task_id),
        invocation_id=task.invocation_id,
        restarts=task.restarts,
        started_at=task.started_at,
        next_start_at=task.next_start_at,
        last_exit=task.last_exit,
        addresses=task.addresses,
        cpus=task.own_cpus if has_own_cpus(task) else [],
    )


def has_own_cpus(task: TaskRecord) -> bool:
    """Return whether a task runs, and its kernel was seen to have it on CPUs of its own."""
    seen = task.resources is not None and task.resources.exclusive_cpus == len(task.own_cpus)
    return bool(task.own_cpus) and seen and task.state is TaskState.RUNNING


def words_on_cpus(cpus: Sequence[int]) -> str:
    """Return which CPUs a task alone runs on, as a sentence."""
    what = "CPU" if len(cpus) == 1 else "CPUs"
    return (
        f"{what} {listed(cpus)} {'is' if len(cpus) == 1 else 'are'} its own"
        if cpus
        else ("it shares the CPUs with others")
    )


def tell_change(before: TaskStatus, after: TaskStatus) -> str:
    """Return one sentence on what became of a task, for the journal and for events."""
    if after.state is not before.state:
        words = f"task {after.task_id}: {before.state} → {after.state}"
        if after.state is TaskState.RUNNING and after.health is not Health.UNKNOWN:
            words += f", {after.health}"
    elif after.health is not before.health:
        words = f"task {after.task_id}: {before.health} → {after.health}"
    elif after.cpus != before.cpus:
        words = f"task {after.task_id}: {words_on_cpus(after.cpus)}"
    elif after.generation != before.generation:
        words = f"task {after.task_id}: generation {after.generation} is wanted"
    else:
        words = f"task {after.task_id}: {after.state}"
    return words + (f" ({after.reason})" if after.reason else "")


_TRANSIENT = {
    "state": TaskState.ACCEPTED,
    "reason": "",
    "next_start_at": None,
    "next_start_boot_s": None,
    "limits": None,
    "resources": None,
    "volumes": None,
}


def must_last(task: TaskRecord) -> bytes:
    """Return what of a record has to be on disk before going on.

    The way to a start (preparing, starting) is seen again on the host; that a unit ran, how
    it ended, and everything the owner asked for is not.
    """
    if task.state in (TaskState.ACCEPTED, TaskState.PREPARING, TaskState.STARTING):
        return msgspec.json.encode(replace(task, **_TRANSIENT))
    return msgspec.json.encode(task)


def only_came_up(before: TaskRecord, after: TaskRecord) -> bool:
    """Return whether all that is new is that the task runs: an order's first start, as a rule.

    An agent that dies finds that on the host. A power cut ends the task as well; then its next
    start does not count as a restart, and its last end is not said to be lost. That is worth less
    than two writes that wait for the disk in each start.
    """
    starting = before.state in (TaskState.ACCEPTED, TaskState.PREPARING, TaskState.STARTING)
    same_order = after.spec is before.spec and after.previous is before.previous
    first = before.invocation_id == "" and before.restarts == 0
    return starting and first and same_order and after.state is TaskState.RUNNING
