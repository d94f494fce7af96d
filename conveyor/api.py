"""Types of a pipeline file."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Argument, DigestStr, EnvName, Name
from agent.api.ranges import END
from control_plane.api.policy import JobName

DAY_S = 86_400
STAGE_MAX_S = 28 * DAY_S
"""A longer time counts as a mistake: no push takes months."""
FLEET = "fleet/"
"""Prefix that distinguishes the name of a fleet from that of a job: no job has such a name."""
Span = Annotated[float, Meta(ge=0, le=STAGE_MAX_S)]
Interval = Annotated[float, Meta(ge=1, le=3600)]
Url = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^\s]+" + END, max_length=2048, description="an http:// or https:// URL"
    ),
]
Who = Annotated[str, Meta(min_length=1, max_length=256)]


class _FilePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types of a pipeline file."""


class StageKind(StrEnum):
    """Which part of a job a stage brings to the new image."""

    CANARY = "canary"
    """A few tasks: `tasks`."""
    PERCENT = "percent"
    """A share of all tasks: `percent`."""
    ALL = "all"
    """Every task, as fast as the job's own `update` settings allow."""


class JobOrder(StrEnum):
    """How a run with several jobs proceeds."""

    IN_ORDER = "in-order"
    """All stages of the first job, then all stages of the next."""
    TOGETHER = "together"
    """Each stage on all jobs, then the next stage."""


class FailureAction(StrEnum):
    """What a run does when a gate fails."""

    ROLLBACK = "rollback"
    """Bring every job of the run back to the image that last finished."""
    STOP = "stop"
    """Update no further task, and leave the tasks as they are."""


class PipelineTrigger(_FilePart, frozen=True, kw_only=True):
    """What starts a run. An empty table: only `twinectl pipeline start`."""

    image: Annotated[str, Meta(max_length=512)] = ""
    """A name of the image store (`web:stable`), a name that images are signed with, or their
    registry reference. A new digest under it starts a run."""
    schedule: Annotated[list[str], Meta(max_length=64)] = []
    """Start only at these times, such as `mon-fri 10:00`; needs `image`."""
    zone: str = "UTC"
    """Time zone of `schedule`."""


class QueryGate(_FilePart, frozen=True, kw_only=True):
    """A Prometheus query whose every series must stay within bounds."""

    promql: Annotated[str, Meta(min_length=1, max_length=4096)]
    """`$tasks` is replaced by a regular expression of the tasks that run the new image."""
    at_most: float | None = None
    """Fails above this value."""
    at_least: float | None = None
    """Fails below this value."""


class CompareGate(_FilePart, frozen=True, kw_only=True):
    """The same Prometheus query on new and on stable tasks, compared by a statistical test."""

    promql: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Sent twice: `$tasks` is replaced by the new tasks, then by the stable ones."""
    better: Annotated[
        str, Meta(pattern="^(lower|higher)" + END, description="`lower` or `higher`")
    ] = "lower"
    """Which direction is good."""
    tolerance: Annotated[float, Meta(ge=0, le=10)] = 0.1
    """The new median may be worse by this share of the stable one."""
    significance: Annotated[float, Meta(gt=0, le=0.5)] = 0.05
    """Probability of a false alarm per measurement (one-sided Mann-Whitney U test)."""
    samples: Annotated[int, Meta(ge=5, le=10_000)] = 10
    """Fewer samples on either side are no data."""
    window_s: Annotated[float, Meta(ge=10, le=DAY_S)] = 300.0
    """Samples are taken over this time before now, but not from before the stage was reached."""
    step_s: Interval = 15.0
    """Interval between two samples of a series; at least the scrape interval."""


class HealthGate(_FilePart, frozen=True, kw_only=True):
    """Health and restarts of the new tasks, from the job's status."""

    restarts: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Restarts of all new tasks together that are allowed in the stage."""


class HttpGate(_FilePart, frozen=True, kw_only=True):
    """An HTTP GET that must answer as expected."""

    url: Url
    """The URL."""
    status: Annotated[int, Meta(ge=100, le=599)] = 200
    """The only status that passes."""
    contains: Annotated[str, Meta(max_length=1024)] = ""
    """Text that the first 64 KiB of the answer must contain."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """No answer within this time is no data."""


class CommandGate(_FilePart, frozen=True, kw_only=True):
    """A command that runs once as a task and must end with exit code 0."""

    run: Annotated[list[Argument], Meta(min_length=1, max_length=64)]
    """The command. Its environment has `PIPELINE`, `PIPELINE_RUN`, `PIPELINE_IMAGE`,
    `PIPELINE_NEW_TASKS` and `PIPELINE_STABLE_TASKS` (task ids)."""
    image: DigestStr | None = None
    """Image that has the command; None: the new image."""
    entitlement: Annotated[str, Meta(max_length=63)] = ""
    """Where it runs; empty: in the entitlement of the stage's first job."""
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=256)] = {}
    """Its additional environment."""
    memory_max_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 44)] = 64 << 20
    """Its memory limit."""
    timeout_s: Annotated[float, Meta(ge=1, le=3600)] = 120.0
    """A command that runs for longer is ended and fails."""


class ApprovalGate(_FilePart, frozen=True, kw_only=True):
    """A user approves: `twinectl pipeline approve`."""

    by: Annotated[list[Who], Meta(max_length=100)] = []
    """Users who may approve, by name, or `local`; empty: every user who may change the pipeline."""


class PipelineGate(_FilePart, frozen=True, kw_only=True):
    """One condition of a stage; exactly one of its tables defines the measurement."""

    query: QueryGate | None = None
    compare: CompareGate | None = None
    health: HealthGate | None = None
    http: HttpGate | None = None
    command: CommandGate | None = None
    approval: ApprovalGate | None = None
    every_s: Interval = 15.0
    """Interval between two measurements."""
    failures: Annotated[int, Meta(ge=1, le=100)] = 1
    """Measurements in a row that must fail before the gate fails."""
    deadline_s: Span = 300.0
    """A gate without a passing measurement this long after the soak fails: missing data is a
    failure."""


class PipelineStage(_FilePart, frozen=True, kw_only=True):
    """A part of the job, how long it is observed, and which gates it must pass."""

    kind: StageKind
    tasks: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Of a canary stage: the number of tasks."""
    percent: Annotated[float, Meta(gt=0, lt=100)] | None = None
    """Of a percent stage: the share of all tasks, at every size of the job; half a task is rounded
    up."""
    soak_s: Span = 0.0
    """How long the tasks run before the gates decide. Failing gates act at once."""
    reach_s: Annotated[float, Meta(gt=0, le=STAGE_MAX_S)] = 1800.0
    """The stage fails if its tasks are not healthy with the new image within this time."""
    gates: Annotated[list[Name], Meta(max_length=32)] = []
    """Names of `[gates.NAME]` tables."""


class DeliveryWindows(_FilePart, frozen=True, kw_only=True):
    """When runs may start and stages may begin. Rollbacks are never held back."""

    during: Annotated[list[str], Meta(max_length=64)] = []
    """Such as `mon-fri 09:00-16:00`; empty: always."""
    zone: str = "UTC"
    """Time zone of `during`, such as `Europe/Berlin`."""


class DeliveryHold(_FilePart, frozen=True, kw_only=True):
    """A period in which no stage begins."""

    begin: Annotated[str, Meta(max_length=40)]
    """Date and time with a zone: `2026-12-20T00:00:00Z`."""
    end: Annotated[str, Meta(max_length=40)]
    """From this date and time on stages begin again."""
    reason: Annotated[str, Meta(min_length=1, max_length=512)]
    """Shown in the status."""


class FailurePolicy(_FilePart, frozen=True, kw_only=True):
    """What a failed run does, and where it reports."""

    action: FailureAction = FailureAction.ROLLBACK
    notify: Annotated[list[Url], Meta(max_length=16)] = []
    """Each gets a POST with JSON at the end of every run that did not finish."""


class PipelineSpec(_FilePart, frozen=True, kw_only=True):
    """The file given to `twinectl pipeline apply`."""

    name: Name
    """Of the pipeline, unique in its delivery service."""
    jobs: Annotated[list[JobName], Meta(max_length=100)] = []
    """Jobs whose image it changes; a job belongs to one pipeline."""
    fleets: Annotated[list[Name], Meta(max_length=100)] = []
    """Instead of jobs: fleets of hosts whose release it changes, by their names in the
    configuration of the service."""
    order: JobOrder = JobOrder.IN_ORDER
    stages: Annotated[list[PipelineStage], Meta(min_length=1, max_length=32)]
    """In order; the last one must be `all`."""
    gates: Annotated[dict[Name, PipelineGate], Meta(max_length=64)] = {}
    """By name; stages refer to them."""
    trigger: PipelineTrigger = PipelineTrigger()
    windows: DeliveryWindows = DeliveryWindows()
    holds: Annotated[list[DeliveryHold], Meta(max_length=64)] = []
    on_failure: FailurePolicy = FailurePolicy()
    prometheus: Url = "http://127.0.0.1:9090"
    """Server of `query` and `compare` gates."""

    @property
    def targets(self) -> list[str]:
        """Return what it changes: names of jobs, or `fleet/NAME`."""
        return [*self.jobs, *(FLEET + name for name in self.fleets)]


GATE_KINDS = ("query", "compare", "health", "http", "command", "approval")
"""Tables of a gate, one for each kind of measurement."""


class StartRequest(_FilePart, frozen=True, kw_only=True):
    """Start a run by hand."""

    image: Annotated[
        str,
        Meta(
            pattern=r"^(sha256:[0-9a-f]{64}|[0-9][0-9A-Za-z.+~-]{0,63})" + END,
            description="a digest (`sha256:…`), or a release of a package (`0.2.0`) for fleets",
        ),
    ]
    reason: Annotated[str, Meta(max_length=512)] = ""


class ControlVerb(StrEnum):
    """What a user may do to a run."""

    APPROVE = "approve"
    PAUSE = "pause"
    RESUME = "resume"
    SKIP = "skip"
    """End the current stage without waiting for its soak and gates; logged with its reason."""
    ROLLBACK = "rollback"
    ABORT = "abort"


class ControlRequest(_FilePart, frozen=True, kw_only=True):
    """Act on the run of a pipeline."""

    verb: ControlVerb
    reason: Annotated[str, Meta(max_length=512)] = ""
    """Why; needed for `skip` and `abort`."""
    gate: Annotated[str, Meta(max_length=64)] = ""
    """Which approval; empty: every one that waits for the caller."""
    expect: Annotated[int, Meta(ge=0)] | None = None
    """Version of the pipeline that the user has seen; a newer one refuses the request."""
