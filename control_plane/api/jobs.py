"""Jobs: the specification that an owner writes, the stored record, and the shown status."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from agent.api import (
    ROOT_MAX_BYTES,
    UMASK,
    Argument,
    Configuration,
    DigestStr,
    Disconnect,
    EnvName,
    Exit,
    Health,
    Limits,
    Name,
    OomPolicy,
    Reach,
    Relaxations,
    Resources,
    RestartPolicy,
    RootBytes,
    RootMode,
    Seconds,
    Stdout,
    TaskState,
    Ulimits,
    Umask,
    VolumeMap,
)
from agent.api.ranges import END
from control_plane.api.autoscale import Autoscale, AutoscaleMode
from control_plane.api.intents import INSTEAD_OF_OVERRIDES, StoredIntent
from control_plane.api.job_life import JobLife
from control_plane.api.job_life import JobProbe as JobProbe
from control_plane.api.operations import Operation
from control_plane.api.policy import (
    Admission,
    Expression,
    Fit,
    Neighbour,
    Overcommit,
    Preference,
    Requirement,
)
from control_plane.api.policy import JobName as JobName
from control_plane.api.updates import Rollout
from control_plane.api.updates import UpdatePolicy as UpdatePolicy


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types that users write."""


class ControllerRef(_Written, frozen=True, kw_only=True):
    """The service that approves operations on the job's tasks (docs/taskcontrol.md)."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^https://(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(?::[0-9]{1,5})?"
            + END,
            description="https://HOST:PORT, without a path",
        ),
    ]
    """Where the scheduler calls it."""
    name: Name
    """Its certificate must be that of `/controller/<name>`."""
    failure_wait_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 300.0
    """Seconds after which a task of a failed machine starts elsewhere without acknowledgement."""


class JobSpec(_Written, frozen=True, kw_only=True):
    """The specification of a job: the file given to `twinectl job apply`."""

    MOVED: ClassVar[dict[str, str]] = INSTEAD_OF_OVERRIDES
    name: JobName
    """Name of the job, unique in the region."""
    entitlement: Name
    """The entitlement on whose machines its tasks run."""
    tasks: Annotated[int, Meta(ge=0, le=15_000)]
    """Number of identical tasks; the paper's largest job has 15,000 (§6.1)."""
    image: DigestStr
    """Digest of an image in the image store; `twinectl image push` prints it. A file may name an
    image instead, such as `redis:7.2`; twinectl replaces it by the digest that it means then
    (docs/operating.md)."""
    command: Annotated[list[Argument], Meta(max_length=4096)] = []
    """The program and its arguments; required, except with the relaxation `own-init`, which
    excludes it. `${port:NAME}`, `${task}` and `${machine}` are replaced in arguments and in the
    environment."""
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """Environment variables of its tasks."""
    ports: Annotated[list[Name], Meta(max_length=16)] = []
    """Names of ports. For each name, a task gets a free port of its machine, as `${port:http}` and
    `TWINE_PORT_HTTP`."""
    limits: Limits = Limits()
    resources: Resources = Resources()
    """Further resources of its tasks: protected memory, disks, own CPUs (docs/resources.md)."""
    volumes: VolumeMap = {}
    """Storage that each of its tasks has in addition to its root, by name (docs/volumes.md)."""
    restart: RestartPolicy = RestartPolicy()
    probe: JobProbe | None = None
    life: JobLife = JobLife()
    """Init steps, a hook before the end, startup and liveness probes, the maximum run time."""
    stop_timeout_s: Seconds = 10.0
    """Seconds between SIGTERM and SIGKILL of the processes of a task that are left."""
    machine_types: Annotated[list[Name], Meta(max_length=1000)] = []
    """Hard requirement: only machines of these types; empty: all types of the entitlement."""
    requires: Annotated[list[Expression | Requirement], Meta(max_length=16)] = []
    """Further hard requirements; all must hold. Each is a text such as
    `gpus >= 4 or label.fast exists` (docs/requirements-grammar.md), or a table with a property and
    its values."""
    preferences: Annotated[list[Preference], Meta(max_length=16)] | None = None
    """Soft preferences, most important first; None: those of the entitlement. The default spread
    over MSBs comes behind them, unless they name another or the list is empty."""
    fit: Fit = Fit.EVEN
    """Which machine is best among those that the preferences rank equal."""
    apart_from: Annotated[list[Neighbour], Meta(max_length=16)] = []
    """Jobs of the entitlement that are kept apart from this job, in both directions."""
    together_with: Annotated[list[Neighbour], Meta(max_length=16)] = []
    """Jobs of the entitlement; tasks of this job are placed only near their tasks."""
    admission: Admission = Admission.PARTIAL
    overcommit: Overcommit = Overcommit()
    """Opt in to less than the limits per task; the entitlement must allow it (AL21)."""
    cpus: Annotated[float, Meta(ge=0.001, le=4096)] | None = None
    """CPU cores that a task claims, if it may use more than its claim. None: its CPU limit; without
    a limit the setting `default_cpu_cores`."""
    rru: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Computing power per task where `limits.cpu_max_cores` would depend on the machine."""
    gpus: Annotated[float, Meta(ge=0, le=64, multiple_of=0.125)] = 0
    """A whole number, or 1/2, 1/4 or 1/8 of one that tasks of the entitlement share; these parts
    always add up to whole ones. `requires` selects the kind of GPU."""
    network_mbps: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    """Network bandwidth that a task claims, in Mbit/s."""
    disk_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Disk space that a task claims on its machine's own disk, in bytes; not enforced."""
    update: UpdatePolicy = UpdatePolicy()
    disconnect: Disconnect = Disconnect()
    """What a machine does with a task when it is cut off from the control plane. With `stop` the
    task is placed elsewhere only once it has certainly ended, so there is never a second copy."""
    credentials: Annotated[dict[Name, Name], Meta(max_length=64)] = {}
    """Files of its tasks' `$CREDENTIALS_DIRECTORY` and the credentials of the entitlement that
    are in them; the machines must hold these (docs/credentials.md)."""
    configuration: Configuration = {}
    """Files of the same folder that are no secrets, with their texts. A push or a canary may change
    these alone, the image alone, or both (docs/intents.md)."""
    identity: bool = False
    """Whether each task has a key and a certificate of its own to prove to others which task it
    is, renewed while it runs (docs/credentials.md)."""
    runtime: Annotated[str, Meta(max_length=63)] = ""
    """The runtime that its push started with; tasks find it in `TWINE_RUNTIME`. Operators choose it
    (docs/intents.md); a file may only repeat the present value."""
    network: Reach = Reach()
    """The network mode of its tasks, and the callers that may reach them; `ports` has the ports."""
    relaxations: Relaxations = []
    """Named exceptions from the sandbox of its tasks; `twinectl job plan` shows the resulting
    exposure (docs/security.md)."""
    ulimits: Ulimits = Ulimits()
    umask: Umask = UMASK
    """Permission bits that new files of its tasks do not get, in octal."""
    oom: OomPolicy = OomPolicy.TASK
    """Which processes end when a task exceeds its memory limit."""
    stdout: Stdout | None = None
    """Where its tasks write their output; None: a pipe, unless they have an init of their own."""
    root: RootMode | None = None
    """Whether its tasks may write to their roots; None: an OCI image may, any other may not
    (docs/images.md)."""
    root_max_bytes: RootBytes = ROOT_MAX_BYTES
    """Maximum number of bytes that a task may write to its root, if it may write there."""
    controller: ControllerRef | None = None
    """The TaskController of the job; None: only `update` limits operations."""
    autoscale: Autoscale | None = None
    """How its size follows its load. With mode `apply`, `tasks` counts only when the job is created
    (docs/autoscaling.md)."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The machine and ports of one task."""

    machine: str
    ports: dict[str, int] = {}


class TaskPhase(StrEnum):
    """What the scheduler is doing with a task."""

    PENDING = "pending"
    """Not placed; `reason` says why."""
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """Removed from discovery; not stopped yet."""
    STOPPING = "stopping"
    PARKED = "parked"
    """Stopped, and waits on its machine for the end of a maintenance."""
    LOST = "lost"
    """Its machine is gone; it is placed elsewhere as soon as there is room."""


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One task of a job: its stored state, and the last report of its agent.

    The report is not stored: after a start the control plane reads it again.
    """

    index: int
    """Stable inside the job, across moves and restarts (MO15)."""
    version: int
    """The version of the job's specification that it runs."""
    generation: int
    """Sent to the agent; rises with each start, stop or move of this task."""
    phase: TaskPhase = TaskPhase.PENDING
    placement: Placement | None = None
    listed: bool = False
    """Whether discovery shows it."""
    since: float = 0.0
    """When the phase last changed, in seconds since 1970; only for display."""
    attempts: int = 0
    """Starts in a row that failed; the pause before the next one grows with them."""
    avoid: str = ""
    """A machine that kept refusing the task, or that the task must leave. The allocator places it
    there only for lack of another machine."""
    operation: Operation | None = None
    """The present operation on it; None: there is none."""
    extra: bool = False
    """An extra task: it runs in addition to the wanted ones during an update or maintenance
    (`surge`)."""
    address: str = ""
    """Its address in its private network; empty: it uses its machine's address."""
    # -- in memory only
    reason: str = ""
    health: Health = Health.UNKNOWN
    state: TaskState | None = None
    """The state that the agent last reported."""
    invocation_id: str = ""
    restarts: int = 0
    last_exit: Exit | None = None
    wants: int = 0
    """The version that it should run, if not all tasks should run the newest one (`compose`)."""
    begun: float | None = None
    """When the phase last changed, on the monotonic clock. None: before this process began, so that
    durations from it start again."""
    retry_at: float = 0.0
    """When a task that failed to start is tried again, on the monotonic clock; 0: it did not
    fail."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job and all its tasks, as one object in memory.

    Stored as a small intent and chunks of tasks (`api/stored_jobs.py`), never as one value.
    """

    schema: int = 2
    name: str
    spec: JobSpec
    version: int
    """Rises when what the tasks run changes; a resize leaves it."""
    specs: dict[int, JobSpec] = {}
    """Specifications that tasks still run, by version."""
    stopping: bool = False
    paused: bool = False
    """No task is taken down for a newer version."""
    rollout: Rollout | None = None
    """The progress of its newest version; None: it never had another version."""
    tasks: list[TaskRecord] = []
    """By index, rising."""
    created_at: float = 0.0
    generation: int = 0
    """The highest generation given to any task of the job; the next one is above it."""
    operations: int = 0
    """Number of operations so far; ids of operations come from it."""
    leaving: dict[str, list[str]] = {}
    """Machine → agent task ids that must be gone there (moved away while it was down)."""
    lasting: dict[str, list[str]] = {}
    """The part of `leaving` that was started with `disconnect = keep`: it may run until its
    machine answers again."""
    asked: int = 0
    """Upper bound of the numbers of controller calls that may have been used."""
    numbered: int = 0
    """The same for an earlier job of this name."""
    reported: int = msgspec.field(name="told", default=0)
    """The controller has received the events of the job's log at least up to this number."""
    intents: dict[str, StoredIntent] = {}
    """Dimension → the intent of its writer. A job that an earlier release stored has none: then
    `version` is pushed to all tasks, and `spec.tasks` is the size."""
    trials: tuple[int, ...] = ()
    """Versions of canaries; kept for as long as a task runs one."""
    highest: int = 0
    """The highest number of a canary's version; a new version is above it."""
    composed: int = 0
    """In memory only: number of writes of intents (`writes_of`) that the tasks' `wants` include;
    0: `wants` are not set."""


class JobPhase(StrEnum):
    """The state of a job as one word."""

    STABLE = "stable"
    PROGRESSING = "progressing"
    WAITING = "waiting"
    """Something is missing; the reasons of the tasks say what."""
    STOPPING = "stopping"


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as the front end shows it."""

    record: JobRecord
    phase: JobPhase
    wanted: int
    running: int
    healthy: int
    updated: int
    """Tasks that run the newest version."""
    detail: str = ""
    update: str = ""
    """The state of the update in a sentence; empty: no problem."""


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of the region."""

    jobs: list[JobStatus]


class JobBrief(msgspec.Struct, frozen=True, kw_only=True):
    """A short form of a job, for programs that follow many jobs and read details after a change."""

    name: str
    entitlement: str
    tasks: int
    """The wanted number."""
    healthy: int
    intents: dict[str, int] = {}
    """Dimension → its version."""
    autoscale: AutoscaleMode | None = None
    """None: its file has no `[autoscale]`, or the job is being stopped."""
    revision: int = 0
    """Changes with every write about the job or its tasks."""


class JobBriefs(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of the region, each in brief."""

    jobs: list[JobBrief]


def task_id(job: str, index: int) -> str:
    """Return the id of a task, unique in the region and stable for its life (MO15)."""
    return f"{job}-{index}"


def task_at(record: JobRecord, index: int) -> TaskRecord | None:
    """Return the task of an index; in a job with many it is mostly at that position."""
    guess = record.tasks[index : index + 1]
    if guess and guess[0].index == index:
        return guess[0]
    return next((task for task in record.tasks if task.index == index), None)


def entitlements_of(record: JobRecord) -> set[str]:
    """Return the entitlements that a job needs.

    Its own, those of its tasks, and the one to which an unfinished update may be rolled back.
    """
    found = {record.spec.entitlement}
    if all(spec.entitlement in found for spec in record.specs.values()):
        return found  # almost always
    versions = {task.version for task in record.tasks}
    if record.rollout is not None and not record.rollout.done:
        versions.add(record.rollout.base)
    return found | {record.specs[v].entitlement for v in versions if v in record.specs}


def spec_of(record: JobRecord, task: TaskRecord) -> JobSpec:
    """Return the specification that a task runs."""
    return record.specs.get(task.version, record.spec)
