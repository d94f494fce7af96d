"""The agent's record of a task, the names that follow from it, and its status for the API."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from agent.api.ranges import bounded
from wire.cpus import cpu_list_text

OVER = (TaskState.STOPPED, TaskState.FAILED)
"""States of a task that has ended and is not started again without a request."""
AT_REST = (TaskState.BACKOFF, *OVER)
"""States of a task whose unit has ended."""


class Wanted(StrEnum):
    """The latest request of a task's owner."""

    RUN = "run"
    GONE = "gone"


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One task: the owner's intent, and the state last observed.

    The first fields up to `restart_asked` are the intent and must never be lost. The rest caches
    the state of systemd and btrfs. With it an end that happened while no agent ran is counted once,
    and health survives a restart of the agent.
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
    """Boot of the host in which the owner sent the last request or the unit was last seen."""
    ended_invocation: str = ""
    """Invocation whose end is already counted."""
    started_at: float | None = None
    started_boot_s: float | None = None
    """Seconds since boot when the task was first seen running; the back-off depends on it."""
    next_start_at: float | None = None
    """Shown to users only: the clock may be stepped, so `next_start_boot_s` decides."""
    next_start_boot_s: float | None = None
    """Seconds since boot, suspend included."""
    restarts: int = 0
    streak: int = 0
    """Number of restarts since the last long run; determines the back-off."""
    last_exit: Exit | None = None
    limits: Limits | None = None
    """Limits that the running unit has."""
    resources: Resources | None = None
    """Resources that the running unit has; None, from an earlier release: `Resources()`."""
    volumes: dict[str, Volume] | None = None
    """Volumes of the running unit, with the limits in force; None: none."""
    own_cpus: list[int] = []
    """CPUs that the agent chose for this task alone; a stopped task keeps them."""
    ids: int | None = None
    """First user id of a task with an init of its own (tasks.core.own_init)."""
    addresses: list[str] = []
    """Addresses in its private network, IPv6 first; empty in the host's network."""
    cut_off: bool = False
    """Whether it was ended because contact was lost; only a command starts it again."""
    started_up: str = ""
    """Invocation whose startup probe succeeded."""
    previous: TaskSpec | None = None
    """The last healthy specification while a newer one has to pass its gate (`tasks.core.gate`)."""
    gate_boot_s: float | None = None
    """Seconds since boot until when it has to be healthy; None while the old version still runs."""
    gone_back: str = ""
    """Why the generation in force is not the latest that was requested."""
    orphan: bool = False
    """Whether it was found on the host without a specification; it is only being removed."""
    unversioned: bool = False
    """Whether a local user removed it without a generation, and no control plane commanded it."""


TOMBSTONE_S = 86_400.0
"""How long the agent recognises a late request for a removed task (trust F-81: 24 hours)."""
_OTHER_BOOT_S = 30 * TOMBSTONE_S


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A removed task, kept so that a late request does not start it again."""

    task_id: str
    generation: int
    epoch: int
    at: float
    """Seconds since 1970 when the task was removed."""
    boot_id: str = ""
    """The boot in which the task was removed; empty, from an earlier release: unknown."""
    boot_s: float = 0.0
    """Seconds since that boot."""
    unversioned: bool = False
    """Whether only the removed generation itself is refused (`TaskRecord.unversioned`)."""


@dataclass(frozen=True, slots=True)
class Instant:
    """The readings of both clocks of the host."""

    at: float
    """Seconds since 1970; the clock may be wrong, and be set."""
    boot_id: str
    boot_s: float
    """Seconds since the boot, suspend included."""


def is_expired(tombstone: Tombstone, now: Instant) -> bool:
    """Return whether a tombstone is too old to be needed.

    Its age is the time for which the host was up. After a reboot a long time of the wall clock
    counts, too: a host that boots every day must not keep all tombstones.
    """
    if tombstone.boot_id == now.boot_id:
        return now.boot_s - tombstone.boot_s >= TOMBSTONE_S
    return now.boot_s >= TOMBSTONE_S or now.at - tombstone.at >= _OTHER_BOOT_S


def key_of(spec: TaskSpec) -> str:
    """Return a hash of the fields that determine the process, as 12 hexadecimal digits.

    Two specifications with the same key can run in the same unit. Their differences (limits, probe,
    restart policy) are applied to the running unit.
    """
    process = (
        spec.image,
        spec.command,
        sorted(spec.environment.items()),
        spec.entitlement,
        spec.stop_timeout_s,
        *_newer_fields(spec),
    )
    return hashlib.sha256(msgspec.json.encode(process)).hexdigest()[:12]


def _newer_fields(spec: TaskSpec) -> Iterator[tuple[object, ...]]:
    """Yield the fields that an earlier release did not have, as parts of the key.

    Each counts only if it is set, so that the keys of units that already run do not change.
    """
    life = spec.life
    if spec.network != Network():
        yield "network", _sorted(spec.network)
    if life.init or life.max_run_s is not None:
        yield "life", [_sorted(step) for step in life.init], life.max_run_s
    if life.notice is not None:
        yield ("notice",)  # the unit does not contain the address and kinds of the hook
    if spec.volumes:
        yield "volumes", _volumes_in_key(spec)
    if spec.resources.exclusive_cpus:
        yield ("own CPUs",)  # the unit is in another slice
    if has_huge_pages(spec):
        yield ("huge pages",)
    if spec.credentials:
        yield "credentials", sorted(spec.credentials.items())
    if spec.configuration:
        yield "configuration", sorted(spec.configuration.items())
    if spec.relaxations:
        yield "relaxations", sorted({*spec.relaxations})
    if spec.ulimits != Ulimits():
        yield "ulimits", _sorted(spec.ulimits)
    if int(spec.umask, 8) != int(UMASK, 8):
        yield "umask", int(spec.umask, 8)
    if spec.oom is not OomPolicy.TASK:
        yield "oom", spec.oom
    if spec.stdout is not None:
        yield "stdout", spec.stdout
    if spec.root is not None or spec.root_max_bytes != ROOT_MAX_BYTES:
        yield "root", spec.root, spec.root_max_bytes
    if spec.identity:
        yield "identity", True


def _volumes_in_key(spec: TaskSpec) -> object:
    """Return the volumes as part of the key, without limits that can change while the unit runs."""
    return [
        (n, _sorted(v if v.kind is VolumeKind.TMPFS else replace(v, max_bytes=None)))
        for n, v in sorted(spec.volumes.items())
    ]


def is_up(task: TaskRecord) -> bool:
    """Return whether a running task has passed its startup probe, if it has one."""
    return task.spec.life.startup is None or task.started_up == task.invocation_id


def has_own_init(spec: TaskSpec) -> bool:
    """Return whether a task has an init of its own."""
    return Relaxation.OWN_INIT in spec.relaxations


def has_huge_pages(spec: TaskSpec) -> bool:
    """Return whether a task has huge pages of its own."""
    return spec.resources.hugepages_2mib > 0 or spec.resources.hugepages_1gib > 0


def user_of(task_id: str) -> str:
    """Return the name of a task's dynamic user, for all its units; at most 31 characters."""
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
    """Return the status of a task as the API shows it."""
    return TaskStatus(
        task_id=task.task_id,
        generation=task.spec.generation,
        epoch=task.spec.epoch,
        state=task.state,
        health=task.health,
        reason=bounded(task.reason or task.gone_back),
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
    """Return whether a task runs, and the kernel was seen to run it on its own CPUs."""
    seen = task.resources is not None and task.resources.exclusive_cpus == len(task.own_cpus)
    return bool(task.own_cpus) and seen and task.state is TaskState.RUNNING


def describe_cpus(cpus: Sequence[int]) -> str:
    """Return one sentence on the CPUs that only this task runs on."""
    if not cpus:
        return "it shares the CPUs with others"
    return (
        f"CPU {cpu_list_text(cpus)} is its own"
        if len(cpus) == 1
        else f"CPUs {cpu_list_text(cpus)} are its own"
    )


def describe_status(status: TaskStatus) -> str:
    """Return the state of a task with its health, reason and own CPUs, for an event."""
    has_health = status.state is TaskState.RUNNING and status.health is not Health.UNKNOWN
    text = str(status.state) + (f", {status.health}" if has_health else "")
    text += f": {status.reason}" if status.reason else ""
    return text + (f": {describe_cpus(status.cpus)}" if status.cpus else "")


def describe_change(before: TaskStatus, after: TaskStatus) -> str:
    """Return one sentence on how a task's status changed, for the journal and for events."""
    if after.state is not before.state:
        text = f"task {after.task_id}: {before.state} → {after.state}"
        if after.state is TaskState.RUNNING and after.health is not Health.UNKNOWN:
            text += f", {after.health}"
    elif after.health is not before.health:
        text = f"task {after.task_id}: {before.health} → {after.health}"
    elif after.cpus != before.cpus:
        text = f"task {after.task_id}: {describe_cpus(after.cpus)}"
    elif after.generation != before.generation:
        text = f"task {after.task_id}: generation {after.generation} is requested"
    else:
        text = f"task {after.task_id}: {after.state}"
    return text + (f" ({after.reason})" if after.reason else "")


_TRANSIENT = {
    "state": TaskState.ACCEPTED,
    "reason": "",
    "next_start_at": None,
    "next_start_boot_s": None,
    "limits": None,
    "resources": None,
    "volumes": None,
}


def durable_part(task: TaskRecord) -> bytes:
    """Return the part of a record that must be on disk before the next step, encoded.

    The steps towards a start (preparing, starting) can be observed again on the host. The requests
    of the owner, the runs of a unit and their ends cannot.
    """
    if task.state in (TaskState.ACCEPTED, TaskState.PREPARING, TaskState.STARTING):
        return msgspec.json.encode(replace(task, **_TRANSIENT))
    return msgspec.json.encode(task)


def is_first_start(before: TaskRecord, after: TaskRecord) -> bool:
    """Return whether the only news is that the task runs, usually the first start of a request.

    Such a record need not be durable. A restarted agent finds the running task on the host. After
    a power cut, which also ends the task, its next start does not count as a restart, and its last
    end is not reported as lost. That is acceptable: a durable write at each start would wait twice
    for the disk.
    """
    starting = before.state in (TaskState.ACCEPTED, TaskState.PREPARING, TaskState.STARTING)
    same_request = after.spec is before.spec and after.previous is before.previous
    first = before.invocation_id == "" and before.restarts == 0
    return starting and first and same_request and after.state is TaskState.RUNNING
