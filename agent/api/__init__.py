"""What crosses the agent's wire: machine facts, images, tasks, profile, events.

Written by people (`TaskSpec` in a file given to `twine-agent run`) means unknown fields are
refused; machine to machine they are tolerated. Units are in the names; "no limit" is None.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from agent.api.credentials import Configuration as Configuration
from agent.api.life import Hook as Hook
from agent.api.life import Life as Life
from agent.api.life import Step as Step
from agent.api.network import Dns as Dns
from agent.api.network import Network as Network
from agent.api.network import NetworkMode as NetworkMode
from agent.api.network import Reach as Reach
from agent.api.oci import REFERENCE_PATTERN as REFERENCE_PATTERN
from agent.api.oci import ImageUser as ImageUser
from agent.api.oci import OciConfig as OciConfig
from agent.api.oci import OciPull as OciPull
from agent.api.oci import Reference as Reference
from agent.api.oci import asked_for_as as asked_for_as
from agent.api.presence import Liveness as Liveness
from agent.api.probes import Probe as Probe
from agent.api.probes import ProbeKind as ProbeKind
from agent.api.profile import ProfileSpec as ProfileSpec
from agent.api.profile import ProfileState as ProfileState
from agent.api.profile import ProfileStatus as ProfileStatus
from agent.api.profile import ProfileSwitch as ProfileSwitch
from agent.api.profile import SettingOutcome as SettingOutcome
from agent.api.profile import SettingStatus as SettingStatus
from agent.api.profile import SettingSwitch as SettingSwitch
from agent.api.ranges import COUNT_MAX as COUNT_MAX
from agent.api.ranges import DIGEST_PATTERN as DIGEST_PATTERN
from agent.api.ranges import END, NO_NUL, NO_NUL_WORDS, Reported, Written
from agent.api.ranges import ID_PATTERN as ID_PATTERN
from agent.api.ranges import Argument as Argument
from agent.api.ranges import Bytes as Bytes
from agent.api.ranges import Count as Count
from agent.api.ranges import CpuWeight as CpuWeight
from agent.api.ranges import DigestStr as DigestStr
from agent.api.ranges import EnvName as EnvName
from agent.api.ranges import Few as Few
from agent.api.ranges import HttpPath as HttpPath
from agent.api.ranges import Id as Id
from agent.api.ranges import Milliseconds as Milliseconds
from agent.api.ranges import Moment as Moment
from agent.api.ranges import Name as Name
from agent.api.ranges import Port as Port
from agent.api.ranges import Seconds as Seconds
from agent.api.ranges import Share as Share
from agent.api.ranges import StartPeriod as StartPeriod
from agent.api.ranges import Words as Words
from agent.api.relaxations import Relaxation as Relaxation
from agent.api.relaxations import Relaxations as Relaxations
from agent.api.resources import IoLimit as IoLimit
from agent.api.resources import Resize as Resize
from agent.api.resources import Resources as Resources
from agent.api.root import ROOT_MAX_BYTES as ROOT_MAX_BYTES
from agent.api.root import OomPolicy as OomPolicy
from agent.api.root import RootBytes as RootBytes
from agent.api.root import RootMode as RootMode
from agent.api.root import Stdout as Stdout
from agent.api.signing import ImageSignature as ImageSignature
from agent.api.signing import ImageTrust as ImageTrust
from agent.api.signing import NamedImage as NamedImage
from agent.api.signing import Signatures as Signatures
from agent.api.volumes import Volume as Volume
from agent.api.volumes import VolumeInfo as VolumeInfo
from agent.api.volumes import VolumeInfos as VolumeInfos
from agent.api.volumes import VolumeKind as VolumeKind
from agent.api.volumes import VolumeMap as VolumeMap

TaskId = NewType("TaskId", str)
Digest = NewType("Digest", str)


class Limits(Written, frozen=True, kw_only=True):
    """What a task may use at most, and its share when there is not enough."""

    cpu_weight: CpuWeight = 100
    """Share of CPU time against its neighbours; 100 is the kernel's default."""
    cpu_max_cores: Annotated[float, Meta(ge=0.01, le=4096)] | None = None
    """Hard limit in CPUs (1.5 = one and a half); None: as much as is idle."""
    memory_max_bytes: Annotated[int, Meta(ge=4 << 20, le=COUNT_MAX)] = 256 << 20
    """Hard limit; a task above it is killed (`oom-kill`). Swap is off for tasks."""
    tasks_max: Annotated[int, Meta(ge=1, le=4_194_304)] = 512
    """Processes and threads together."""


Ulimit = Annotated[int, Meta(ge=0, le=COUNT_MAX)] | None


class Ulimits(Written, frozen=True, kw_only=True):
    """Limits of each process (setrlimit(2)), soft and hard; None: those of the host's services."""

    nofile: Annotated[int, Meta(ge=16, le=1 << 20)] | None = None
    """Open files. The kernel takes at most 1,048,576 (`fs.nr_open`)."""
    nproc: Annotated[int, Meta(ge=1, le=4_194_304)] | None = None
    """Processes and threads of the task's user; see `limits.tasks_max`, too."""
    memlock_bytes: Ulimit = None
    """Memory that may be locked; it counts towards `limits.memory_max_bytes`."""
    stack_bytes: Annotated[int, Meta(ge=64 << 10, le=COUNT_MAX)] | None = None
    """Stack of the main thread."""
    core_bytes: Ulimit = None
    """Size of a core dump; None: no core dumps."""


Umask = Annotated[
    str, Meta(pattern="^0?[0-7]{3}" + END, description='three octal digits, for instance "0022"')
]
UMASK = "0022"
"""The default of other container runtimes."""


class RestartWhen(StrEnum):
    """After which ends a task is started again."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


class RestartPolicy(Written, frozen=True, kw_only=True):
    """What happens when a task ends on its own."""

    when: RestartWhen = RestartWhen.ALWAYS
    backoff_s: Seconds = 1.0
    """Pause before the first restart; it doubles with each one …"""
    backoff_max_s: Seconds = 300.0
    """… up to this, and starts over once the task ran for ten minutes."""


class DisconnectPolicy(StrEnum):
    """What happens to a task whose machine has lost contact with its control plane."""

    KEEP = "keep"
    """It runs on; another copy may be started elsewhere meanwhile."""
    STOP = "stop"
    """Its host ends it, so that there is never a second copy."""


class Disconnect(Written, frozen=True, kw_only=True):
    """What a machine that is cut off from its control plane does to a task."""

    policy: DisconnectPolicy = DisconnectPolicy.KEEP
    after_s: Annotated[float, Meta(ge=5, le=86_400)] = msgspec.field(default=30.0, name="after")
    """With `stop`: how long contact may be lost. At least as long as a few polls take."""


CLOCK_RATE_ERROR = 0.001
"""Most by which two hosts' clocks run apart: twice the 500 ppm to which the kernel slews one
(adjtimex(2)), one each way."""
CERTAIN_MARGIN_S = 10.0
"""What a host may be late by: its fence looks twice a second, gives systemd two seconds, is
restarted within three when it was killed; the rest is for a busy host (docs/adr/0024)."""


def certainly_ended_s(disconnect: Disconnect, stop_timeout_s: float) -> float | None:
    """Return how long after its agent's last answer a task has certainly ended.

    In seconds on the caller's clock, suspend included. None: it is never certain (`keep`).
    The last answer is one to `get_events`; other answers prolong nothing (docs/adr/0024).
    """
    if disconnect.policy is DisconnectPolicy.KEEP:
        return None
    alone_s = disconnect.after_s + stop_timeout_s + CERTAIN_MARGIN_S
    return alone_s * (1.0 + CLOCK_RATE_ERROR)


class TaskSpec(Written, frozen=True, kw_only=True):
    """The desired state of one task."""

    generation: Annotated[int, Meta(ge=1, le=COUNT_MAX)] = 1
    """Rises with each change; an older one is refused, and so is the same one with another
    content. The same specification again changes nothing."""
    epoch: Count = 0
    """Leadership term of the sender; 0 for a local operator."""
    image: DigestStr
    """An image that the host has: `twine-agent image list`."""
    command: Annotated[list[Argument], Meta(max_length=4096)] = []
    """Empty: the command of an OCI image."""
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """What the task finds in its environment."""
    entitlement: Name = "local"
    """The entitlement that it belongs to; it runs in the entitlement's slice."""
    job: Annotated[
        str, Meta(max_length=128, pattern=NO_NUL, description=NO_NUL_WORDS.format(128))
    ] = ""
    """The job that it belongs to; for people."""
    limits: Limits = Limits()
    restart: RestartPolicy = RestartPolicy()
    probe: Probe | None = None
    """Whether it can serve. It decides about health alone; see `life` for what restarts a task."""
    life: Life = Life()
    """Steps before its start, a hook before its end, further probes, its longest run."""
    stop_timeout_s: Seconds = 10.0
    """From SIGTERM to SIGKILL of everything the task left."""
    offline_restart: bool = False
    """After a host reboot, start again without a request; void where `disconnect` is `stop`."""
    disconnect: Disconnect = Disconnect()
    network: Network = Network()
    resources: Resources = Resources()
    volumes: VolumeMap = {}
    """Volumes in addition to its root, by name (docs/volumes.md)."""
    credentials: Annotated[dict[Name, Name], Meta(max_length=64)] = {}
    """File of its `$CREDENTIALS_DIRECTORY` → credential of its entitlement."""
    configuration: Configuration = {}
    """Files of its `$CREDENTIALS_DIRECTORY` that are no secrets, with their texts."""
    identity: bool = False
    """Whether it has a key and a certificate in `/run/twine-identity` (docs/credentials.md)."""
    image_trust: ImageTrust = ImageTrust()
    """Keys that the image must be signed with (any one), and its signatures (docs/security.md)."""
    relaxations: Relaxations = []
    """What it may do beyond its sandbox, by name (docs/security.md)."""
    ulimits: Ulimits = Ulimits()
    umask: Umask = UMASK
    """Permission bits that its new files do not get, in octal."""
    oom: OomPolicy = OomPolicy.TASK
    """What ends when it is above its memory limit."""
    stdout: Stdout | None = None
    """What it writes to; None: a pipe, unless it has an init of its own."""
    root: RootMode | None = None
    """Whether it may write to its root; None: an OCI image may (docs/images.md)."""
    root_max_bytes: RootBytes = ROOT_MAX_BYTES
    """What it may write there at most, where it may."""


class TaskState(StrEnum):
    """Where a task is in its life (docs/task-lifecycle.md)."""

    ACCEPTED = "accepted"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Health(StrEnum):
    """Result of the probe; a task without a probe is healthy while it runs."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Exit(Reported, frozen=True, kw_only=True, gc=False):
    """How the main process of a task ended."""

    result: Id
    """systemd's word: success, exit-code, signal, oom-kill, timeout, …; `lost` after a
    host reboot; `cut-off` where the host ended it because of `disconnect`; `evicted` where it
    had to go because memory was short; `oomd-kill` where systemd-oomd killed it for that;
    `start-timeout` where it was not up in time; `startup` and `liveness` where that probe failed
    for good."""
    code: Annotated[int, Meta(ge=-(1 << 31), le=1 << 32)] | None = None
    signal: Id | None = None
    at: Moment
    """Seconds since 1970."""


def exit_text(last: Exit) -> str:
    """Return in words how a task ended: `exit code 3`, `signal SIGSEGV`, `oom-kill`."""
    if last.signal is not None:
        how = f"signal {last.signal}"
    elif last.code is not None:
        how = f"exit code {last.code}"
    else:
        return last.result
    return how if last.result in ("success", "exit-code", "signal") else f"{last.result}, {how}"


class TaskStatus(Reported, frozen=True, kw_only=True, gc=False):
    """The observed state of one task, for the generation it reflects."""

    task_id: Id
    generation: Count
    epoch: Count
    state: TaskState
    health: Health
    reason: Words = ""
    """In words: why it failed, waits or is unhealthy."""
    image: Id
    entitlement: Id = "local"
    job: Id = ""
    unit: Id = ""
    invocation_id: Id = ""
    """Changes with each start of the unit, and only then (systemd.exec(5))."""
    restarts: Count = 0
    started_at: Moment | None = None
    next_start_at: Moment | None = None
    last_exit: Exit | None = None
    addresses: Annotated[list[Id], Meta(max_length=16)] = []
    """Addresses in its private network, IPv6 first; none while it is in the host's."""
    cpus: Annotated[list[Few], Meta(max_length=4096)] = []
    """CPUs that it alone runs on, as read from the kernel; none where it shares them."""


class Tasks(Reported, frozen=True, kw_only=True):
    """All tasks of a machine."""

    tasks: Annotated[list[TaskStatus], Meta(max_length=100_000)]


class ImageFormat(StrEnum):
    """How an image travels."""

    TAR = "tar"
    BTRFS = "btrfs"
    """A stream of `btrfs send`, full or on top of an image that is here."""
    OCI = "oci"
    """An OCI layout as a tar (skopeo's `oci-archive:`)."""


class ImageInfo(Reported, frozen=True, kw_only=True):
    """One image that is complete and can be started from."""

    digest: Id
    """SHA-256 of the stream it came from."""
    format: ImageFormat
    stream_bytes: Bytes
    created_at: Moment
    tasks: Annotated[list[Id], Meta(max_length=100_000)] = []
    """Ids of the tasks that run from it; while there are any it cannot be deleted."""
    reference: Annotated[str, Meta(max_length=512)] = ""
    """Where it was fetched from, for one from a registry."""
    manifest: Id = ""
    """Digest of the manifest of an OCI image."""
    layers: Annotated[list[Id], Meta(max_length=1024)] = []
    """Chain ids of an OCI image's layers, lowest first; images share them."""
    signatures: Signatures = []
    """Signatures of the image, in the image store only. On a host each task carries its own."""
    owner: Id = ""
    """User that pushed the image, in the image store only. It counts against this user's share."""
    names: Annotated[list[Id], Meta(max_length=1000)] = []
    """Names that refer to the image now, such as `redis:7.2`; in the image store only."""
    config: OciConfig | None = None
    """How an OCI image wants to be run; a task's specification overrides it."""


class Images(Reported, frozen=True, kw_only=True):
    """All images of a machine."""

    images: Annotated[list[ImageInfo], Meta(max_length=100_000)]


class ImagePull(Reported, frozen=True, kw_only=True):
    """A request to fetch an image from the control plane's image store."""

    digest: DigestStr
    format: ImageFormat = ImageFormat.TAR
    path: Id
    """Where below the agent's own control plane, for instance `/v1/images/sha256:…`; never a
    URL, so that no caller can make the agent call elsewhere."""
    trust: ImageTrust = ImageTrust()
    """Checked before a byte is fetched."""


class MachineFacts(Reported, frozen=True, kw_only=True):
    """What a machine has. Sizes in bytes."""

    machine_id: Id
    """Name of the machine in the control plane, the host name until it has joined."""
    boot_id: Id
    kernel: Id
    cpu_model: Id
    cpus: Few
    """Hardware threads that are online."""
    sockets: Few
    numa_nodes: Few
    memory_bytes: Bytes
    hugepages_bytes: Bytes = 0
    """Taken as huge pages, and so no memory that a task could be promised."""
    disk_bytes: Bytes
    """Size of the file system that holds images and tasks."""
    disk_free_bytes: Bytes
    nics: Annotated[list[Id], Meta(max_length=4096)] = []
    agent_version: Id
    capabilities: Annotated[list[Id], Meta(max_length=1024)] = []
    """What works here: `cgroup-v2`, `btrfs`, `systemd-257`, `private-pids`, …"""
    problems: Annotated[list[Words], Meta(max_length=1024)] = []
    """In words what is wrong with the host, such as a disk that is read-only."""
    log_lines_suppressed: Count = 0
    """Lines of tasks since boot that were above the rate of 10,000 in 10 s, and are in no log."""
    log_lines_lost: Count = 0
    """Lines of tasks since boot that the journal did not take, and are in no log."""
    leaving: bool = False
    """It is about to go down: its tasks end, and none starts."""


class Running(Reported, frozen=True, kw_only=True):
    """Tasks that have processes."""

    tasks: Annotated[list[Id], Meta(max_length=100_000)]


class Event(Reported, frozen=True, kw_only=True):
    """Something that happened on the machine, in order."""

    sequence: Count
    """Rises by one; resume with `after=<sequence>`."""
    at: Moment
    kind: Id
    """`task`, `task-removed`, `image`, `profile`, `agent`, `leaving`."""
    object: Id
    """Id of the task or image, name of the profile."""
    message: Words
    task: TaskStatus | None = None


class Events(Reported, frozen=True, kw_only=True):
    """A piece of the event stream."""

    events: Annotated[list[Event], Meta(max_length=100_000)]
    latest: Count
    """Sequence of the newest event there is; pass it as `after` next time."""
    lost: bool = False
    """Events after the asked one are gone (too old, or the agent restarted): list all
    tasks again, then go on from `latest`."""
    boot_id: Id = ""
    answered: Id = ""
    """Name of this answer. Sent with later requests (`heard`), it proves that it arrived."""


class Ack(Reported, frozen=True, kw_only=True):
    """The request was taken."""

    detail: Words = "ok"


class Location(Written, frozen=True, kw_only=True):
    """The five levels above a machine (paper §2.1); the machine's name is the sixth."""

    region: Name = "local"
    datacenter: Name = "dc1"
    msb: Name = "msb1"
    """Main switch board: the largest part of a data center that fails on its own."""
    row: Name = "row1"
    rack: Name = "rack1"
