"""The stored state of a pipeline and its runs, and the API's views."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from control_plane.api.intents import PushIntent
from conveyor.api import PipelineSpec

LOG_MAX = 500
"""Entries of one run's log; the oldest ones after the first ten are dropped."""


class RunState(StrEnum):
    """The state of a run. A run ends once; an ended run never changes."""

    WAITING = "waiting"
    """No job was changed yet; a newer image replaces it."""
    RUNNING = "running"
    ROLLING_BACK = "rolling-back"
    DONE = "done"
    ROLLED_BACK = "rolled-back"
    STOPPED = "stopped"
    """It failed, and its jobs stay as they are."""
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    """A newer image came before it began."""


ENDED = frozenset(
    (RunState.DONE, RunState.ROLLED_BACK, RunState.STOPPED, RunState.ABORTED, RunState.SUPERSEDED)
)


def short_image(image: str) -> str:
    """Return a short form of an image or a release: the first digits of a digest."""
    return image[7:19] if image.startswith("sha256:") else image


class GateOutcome(StrEnum):
    """Result of one measurement."""

    PASS = "pass"
    FAIL = "fail"
    NO_DATA = "no-data"


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement of a gate, with its numbers."""

    gate: str
    step: int
    """Index of the step of the run that it belongs to."""
    at: float
    """When, in seconds since 1970."""
    outcome: GateOutcome
    reason: str
    """The outcome in a sentence, with the numbers."""
    numbers: dict[str, float] = {}
    in_a_row: int = 1
    """Measurements with this outcome in a row, this one included."""
    after_soak: bool = False
    """Whether the soak was over when it was taken."""
    by: str = ""
    """The user who approved."""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a run."""

    at: float
    who: str
    """The name of a user, `local`, or `conveyor`."""
    what: str
    step: int | None = None


class StepTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a step of a run began, was reached and ended, in seconds since 1970."""

    name: str
    began: float
    reached: float | None = None
    """When its tasks were healthy with the new image: the soak counts from here."""
    ended: float | None = None
    restarts: int | None = None
    """Restarts of the new tasks when it was reached."""
    blocked_s: float = 0.0
    """Time for which a hold or a pause of the owner blocked the step."""


class RunObserved(msgspec.Struct, frozen=True, kw_only=True):
    """When a run was last observed, and the boot of the host that observed it."""

    boot: str
    at: float
    """In seconds since 1970, by the clock of that host."""


class PipelineRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of one image through the stages."""

    number: int
    image: str
    trigger: str
    """`image`, `schedule` or `hand`."""
    by: str
    created: float
    spec: PipelineSpec
    """The pipeline as it was when the run began; a changed file applies from the next run on."""
    state: RunState = RunState.WAITING
    step: int = 0
    """Index into the steps of `core.stages.steps`."""
    steps: tuple[StepTime, ...] = ()
    """Times of the steps that began."""
    back: dict[str, str] = {}
    """Job → image that a rollback restores, as it was when the run began."""
    pushed: tuple[str, ...] = ()
    """Jobs that were observed to want the new image."""
    paused: bool = False
    skip: int | None = None
    """Step that ends without its soak and gates."""
    ending: RunState | None = None
    """State that the run ends in once its jobs are paused."""
    verdicts: dict[str, GateVerdict] = {}
    """The newest verdict of each gate in the current step."""
    measured: int = 0
    """Verdicts so far; each is stored under its number."""
    log: tuple[LogEntry, ...] = ()
    waits: str = ""
    """What the run waits for, in a sentence."""
    blocked_since: float | None = None
    """When a hold or a pause of the owner began to block the step."""
    observed: RunObserved | None = None
    """Stored every minute; None: the boot of the host is not known."""
    ended: float | None = None
    reason: str = ""
    """Why it failed, or was ended."""

    @property
    def content(self) -> str:
        """Return the image or the release that the run delivers, as text."""
        return f"{'release' if self.spec.fleets else 'image'} {short_image(self.image)}"


class PipelineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline: its stored record, written by one compare-and-set each time."""

    schema: int = 1
    spec: PipelineSpec
    version: int = 0
    """Rises with each request of a user and each new run."""
    applied_by: str = ""
    applied_at: float = 0.0
    good: dict[str, str] = {}
    """Job → image of the last run that finished on it."""
    previous: dict[str, str] = {}
    """Job → image before `good`: the target of a rollback after the end of a run."""
    frozen: tuple[str, ...] = ()
    """Jobs whose updates this service paused."""
    last_image: str = ""
    """Newest image that the trigger observed; only a change of it starts a run."""
    looked: float | None = None
    """When the schedule was last checked, in seconds since 1970."""
    next_run: int = 1
    active: PipelineRun | None = None
    waiting: PipelineRun | None = None
    unsent: tuple[int, ...] = ()
    """Runs whose notification was not delivered yet."""
    unchecked: tuple[int, ...] = ()
    """Ended runs whose commands of gates may still run as jobs."""


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended."""

    schema: int = 1
    run: PipelineRun


class StoredVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict of a run, under its number."""

    schema: int = 1
    verdict: GateVerdict


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as the API shows it."""

    record: PipelineRecord
    jobs: list[JobProgress] = []
    last: PipelineRun | None = None
    """The run that last ended."""
    trouble: str = ""
    """Why the service cannot read or change the jobs at present; empty: it can."""
    now: float = 0.0


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the service observes it."""

    job: str
    image: str = ""
    """The image that the job wants; empty: there is no such job."""
    size: int = 0
    new: int = 0
    """Tasks that run the run's image."""
    new_healthy: int = 0
    new_unhealthy: int = 0
    """New tasks that are unhealthy, or that fail again and again. A starting task is neither
    healthy nor unhealthy."""
    healthy: int = 0
    restarts: int = 0
    """Restarts of the tasks that run the run's image."""
    updating: bool = False
    """An update is under way."""
    settled: bool = False
    """The update is over, and at most the job's `max_unavailable` tasks are missing."""
    halted: str = ""
    """Why the scheduler halted the update; empty: it did not."""
    frozen: bool = False
    """The job is paused."""
    push: PushIntent = PushIntent(version=0)
    """The part of the tasks on which the image is wanted."""
    push_version: int = 0
    """Version of the push intent, which a write replaces."""
    push_reason: str = ""
    """The reason given by the writer of the push."""
    owner: str = ""
    """Writer that owns the push; empty: any writer may change it without `take_over`."""
    went_back: str = ""
    """Why the scheduler rolled the job back (`update.on_failure`); empty: it did not."""
    held: str = ""
    """Why, and until when, nothing may begin; empty: the job is not held."""
    refused: str = ""
    """Why the last change of the job was refused; empty: it was not."""
    new_tasks: tuple[str, ...] = ()
    stable_tasks: tuple[str, ...] = ()


class PipelineViews(msgspec.Struct, frozen=True, kw_only=True):
    """All pipelines."""

    pipelines: list[PipelineView]
    damaged: dict[str, str] = {}
    """Pipeline whose stored record cannot be read → why; nothing is done for it."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What applying a file would do."""

    changed: list[str]
    """Top-level keys that differ from the stored file."""
    steps: list[str]
    """What each step of the next run does, in order, at the jobs' present sizes."""
    warnings: list[str] = []


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of a pipeline, the newest first, with their verdicts."""

    runs: list[PipelineRun]
    verdicts: dict[int, list[GateVerdict]] = {}
    """Run → its verdicts, oldest first: the newest 500, or all if one run was asked for."""
