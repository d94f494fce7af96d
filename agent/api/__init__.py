"""Types of the agent's API: machine facts, images, tasks, profile, events.

Types that people write (`TaskSpec` in a file given to `twine-agent run`) refuse unknown fields.
Types between programs ignore them. Names of fields contain their units; None means "no limit".
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api.credentials import Configuration as Configuration
from agent.api.images import ImageFormat as ImageFormat
from agent.api.images import ImageInfo as ImageInfo
from agent.api.images import ImagePull as ImagePull
from agent.api.images import Images as Images
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
from agent.api.oci import pull_event_text as pull_event_text
from agent.api.presence import Liveness as Liveness
from agent.api.probes import Probe as Probe
from agent.api.probes import ProbeKind as ProbeKind
from agent.api.profile import ProfileSpec as ProfileSpec
from agent.api.profile import ProfileState as ProfileState
from agent.api.profile import ProfileStatus as ProfileStatus
from agent.api.profile import SettingOutcome as SettingOutcome
from agent.api.ranges import COUNT_MAX as COUNT_MAX
from agent.api.ranges import DIGEST_PATTERN as DIGEST_PATTERN
from agent.api.ranges import END, NO_NUL, NO_NUL_WORDS, CpuWeight, Reported, Written
from agent.api.ranges import ID_PATTERN as ID_PATTERN
from agent.api.ranges import Argument as Argument
from agent.api.ranges import Bytes as Bytes
from agent.api.ranges import Count as Count
from agent.api.ranges import DigestStr as DigestStr
from agent.api.ranges import EnvName as EnvName
from agent.api.ranges import Few as Few
from agent.api.ranges import HttpPath as HttpPath
from agent.api.ranges import Id as Id
from agent.api.ranges import Moment as Moment
from agent.api.ranges import Name as Name
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
from agent.api.volumes import Volume as Volume
from agent.api.volumes import VolumeInfo as VolumeInfo
from agent.api.volumes import VolumeInfos as VolumeInfos
from agent.api.volumes import VolumeKind as VolumeKind
from agent.api.volumes import VolumeMap as VolumeMap


class Limits(Written, frozen=True, kw_only=True):
    """The most that a task may use, and its share when CPU time is short."""

    cpu_weight: CpuWeight = 100
    """Share of CPU time relative to other tasks; 100 is the kernel's default."""
    cpu_max_cores: Annotated[float, Meta(ge=0.01, le=4096)] | None = None
    """Hard limit in CPUs (1.5 = one and a half); None: all idle CPU time."""
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
    """Which exits of a task lead to a restart."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


class RestartPolicy(Written, frozen=True, kw_only=True):
    """What happens when a task ends on its own."""

    when: RestartWhen = RestartWhen.ALWAYS
    backoff_s: Seconds = 1.0
    """Pause before the first restart. It doubles with each restart."""
    backoff_max_s: Seconds = 300.0
    """The longest pause, of 1 s at least. The first pause applies again once the task ran for ten
    minutes."""


class DisconnectPolicy(StrEnum):
    """What happens to a task whose machine has lost contact with its control plane."""

    KEEP = "keep"
    """The task continues; another copy may be started elsewhere meanwhile."""
    STOP = "stop"
    """The host ends the task, so that there is never a second copy."""


class Disconnect(Written, frozen=True, kw_only=True):
    """What a machine does with a task when it has lost contact with its control plane."""

    policy: DisconnectPolicy = DisconnectPolicy.KEEP
    after_s: Annotated[float, Meta(ge=5, le=86_400)] = msgspec.field(default=30.0, name="after")
    """With `stop`: how long contact may be lost. It should cover a few polls."""


CLOCK_RATE_ERROR = 0.001
"""The largest relative difference in speed of two hosts' clocks: twice 500 ppm, by which the kernel
slews one clock at most (adjtimex(2))."""
CERTAIN_MARGIN_S = 10.0
"""The longest delay of a host. Its fence checks twice a second, allows systemd two seconds, and is
restarted within three seconds if it was killed. The rest is for a busy host (docs/adr/0024)."""


def certainly_ended_s(disconnect: Disconnect, stop_timeout_s: float) -> float | None:
    """Return how long after its agent's last answer a task has certainly ended.

    In seconds on the caller's clock, including suspend. None: it is never certain (`keep`).
    Only answers to `get_events` count as the last answer (docs/adr/0024).
    """
    if disconnect.policy is DisconnectPolicy.KEEP:
        return None
    alone_s = disconnect.after_s + stop_timeout_s + CERTAIN_MARGIN_S
    return alone_s * (1.0 + CLOCK_RATE_ERROR)


class TaskSpec(Written, frozen=True, kw_only=True):
    """The desired state of one task."""

    generation: Annotated[int, Meta(ge=1, le=COUNT_MAX)] = 1
    """Rises with each change. An older generation is refused, and so is the same generation with
    other content. Repeating a specification changes nothing."""
    epoch: Count = 0
    """Leadership term of the sender; 0 for a local operator."""
    image: DigestStr
    """An image that the host has: `twine-agent image list`."""
    command: Annotated[list[Argument], Meta(max_length=4096)] = []
    """Empty: the command of an OCI image."""
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """Environment variables of the task."""
    entitlement: Name = "local"
    """The entitlement that it belongs to; it runs in the entitlement's slice."""
    job: Annotated[
        str, Meta(max_length=128, pattern=NO_NUL, description=NO_NUL_WORDS.format(128))
    ] = ""
    """The job that it belongs to; for people."""
    limits: Limits = Limits()
    restart: RestartPolicy = RestartPolicy()
    probe: Probe | None = None
    """Whether it can serve. It decides only about health; see `life` for what restarts a task."""
    life: Life = Life()
    """Steps before its start, a hook before its end, further probes, its longest run."""
    stop_timeout_s: Seconds = 10.0
    """From SIGTERM to SIGKILL of the processes that remain."""
    offline_restart: bool = False
    """After a host reboot, start again without a request. No effect if `disconnect` is `stop`."""
    disconnect: Disconnect = Disconnect()
    network: Network = Network()
    resources: Resources = Resources()
    volumes: VolumeMap = {}
    """Volumes in addition to its root, by name (docs/volumes.md)."""
    credentials: Annotated[dict[Name, Name], Meta(max_length=64)] = {}
    """File in its `$CREDENTIALS_DIRECTORY` → credential of its entitlement."""
    configuration: Configuration = {}
    """Files in its `$CREDENTIALS_DIRECTORY` that are not secret, with their texts."""
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
    """What the kernel kills when the task is above its memory limit."""
    stdout: Stdout | None = None
    """Where its output goes; None: a pipe, unless it has its own init."""
    root: RootMode | None = None
    """Whether it may write to its root; None: only with an OCI image (docs/images.md)."""
    root_max_bytes: RootBytes = ROOT_MAX_BYTES
    """The most that it may write to a writable root."""


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
    """systemd's result: success, exit-code, signal, oom-kill, timeout, …; `lost` after a host
    reboot; `cut-off` if the host ended it because of `disconnect`; `evicted` if the host ended it
    because memory was short; `oomd-kill` if systemd-oomd killed it for the same reason;
    `start-timeout` if it did not start in time; `startup` or `liveness` if that probe failed
    for good."""
    code: Annotated[int, Meta(ge=-(1 << 31), le=1 << 32)] | None = None
    signal: Id | None = None
    at: Moment
    """Seconds since 1970."""


def exit_text(last: Exit) -> str:
    """Describe how a task ended: `exit code 3`, `signal SIGSEGV`, `oom-kill`."""
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
    """Why it failed, waits or is unhealthy."""
    image: Id
    entitlement: Id = "local"
    job: Id = ""
    unit: Id = ""
    invocation_id: Id = ""
    """Changes only with a start of the unit (systemd.exec(5))."""
    restarts: Count = 0
    started_at: Moment | None = None
    next_start_at: Moment | None = None
    last_exit: Exit | None = None
    addresses: Annotated[list[Id], Meta(max_length=16)] = []
    """Addresses in its private network, IPv6 first; none in the host's network."""
    cpus: Annotated[list[Few], Meta(max_length=4096)] = []
    """Its exclusive CPUs, as read from the kernel; none if it shares them."""


class Tasks(Reported, frozen=True, kw_only=True):
    """All tasks of a machine."""

    tasks: Annotated[list[TaskStatus], Meta(max_length=100_000)]


class MachineFacts(Reported, frozen=True, kw_only=True):
    """Hardware, software and condition of a machine. Sizes in bytes."""

    machine_id: Id
    """Name of the machine in the control plane; the host name until it has joined."""
    boot_id: Id
    kernel: Id
    cpu_model: Id
    cpus: Few
    """Hardware threads that are online."""
    sockets: Few
    numa_nodes: Few
    memory_bytes: Bytes
    hugepages_bytes: Bytes = 0
    """Memory reserved as huge pages; tasks cannot get it as ordinary memory."""
    disk_bytes: Bytes
    """Size of the file system that holds images and tasks."""
    disk_free_bytes: Bytes
    nics: Annotated[list[Id], Meta(max_length=4096)] = []
    agent_version: Id
    capabilities: Annotated[list[Id], Meta(max_length=1024)] = []
    """Features that work on this host: `cgroup-v2`, `btrfs`, `systemd-257`, `private-pids`, …"""
    profiles: Annotated[tuple[Id, ...], Meta(max_length=1024)] = ()
    """Names of the host profiles that are installed on it; none from agents of earlier releases."""
    problems: Annotated[list[Words], Meta(max_length=1024)] = []
    """Descriptions of defects of the host, such as a read-only disk."""
    log_lines_suppressed: Count = 0
    """Lines of tasks since boot that were dropped above the rate of 10,000 in 10 s."""
    log_lines_lost: Count = 0
    """Lines of tasks since boot that the journal did not accept."""
    leaving: bool = False
    """Whether the host is shutting down: its tasks end, and none starts."""


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
    """Events after `after` are gone (too old, or the agent restarted): list all tasks again,
    then continue from `latest`."""
    boot_id: Id = ""
    answered: Id = ""
    """Name of this answer. Later requests send it back, which proves that it arrived."""


class Ack(Reported, frozen=True, kw_only=True):
    """The request was accepted."""

    detail: Words = "ok"


class Location(Written, frozen=True, kw_only=True):
    """The five levels above a machine (paper §2.1); the machine's name is the sixth."""

    region: Name = "local"
    datacenter: Name = "dc1"
    msb: Name = "msb1"
    """Main switch board: the largest part of a data center that fails on its own."""
    row: Name = "row1"
    rack: Name = "rack1"
