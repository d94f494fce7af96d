"""Writes and shows the intents of jobs for the front end, with the effect of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from control_plane.allocator.core.claims import Claims
from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    IntentChange,
    IntentView,
    JobIntents,
    PushChange,
    SizeChange,
    TaskCount,
)
from control_plane.api.intents import Dimension, HoldIntent, InfrastructureIntent
from control_plane.api.jobs import JobBrief, JobBriefs, JobRecord, TaskPhase
from control_plane.job_control.core.intents import WITHDRAWABLE, views
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.core.assignment import unified_summary
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.job_change import canary_change, push_change, size_change
from control_plane.scheduler.core.release import with_rollout
from control_plane.scheduler.core.rollout import summarize
from control_plane.scheduler.core.rollout_progress import describe_progress
from control_plane.scheduler.job_control import JobControl
from control_plane.store import Operation
from wire.errors import InvalidInput

_TO_CHANGE = "its tasks are to change"
"""Why tasks run a version that no intent requests any more."""


class IntentService:
    """Calls of the writers of intents; each call returns all dimensions of the job."""

    def __init__(
        self,
        runtime: Runtime,
        jobs: JobTable,
        control: JobControl,
        claims_of: Callable[[str], Claims | None],
    ) -> None:
        """`claims_of` returns what the tasks of a job have been given; None: nothing."""
        self._runtime, self._jobs, self._control = runtime, jobs, control
        self._claims_of = claims_of
        self._briefs: dict[str, tuple[JobRecord, JobBrief]] = {}

    async def show(self, name: str) -> JobIntents:
        """Return every dimension of a job with its effect now, or raise `NotFound`."""
        record, claims = self._jobs.get(name), self._claims_of(name)
        copied = claims and claims.copy()  # a thread must not read what the loop changes
        now = Moment(self._runtime.date(), self._runtime.now())
        return await self._runtime.compute(len(record.tasks), _effects, record, copied, now)

    async def briefs(self) -> JobBriefs:
        """Return all jobs in brief; entries of unchanged jobs are reused from the last call."""
        known, found = self._briefs, dict[str, tuple[JobRecord, JobBrief]]()
        for name in list(self._jobs):
            record = self._jobs.find(name)
            if record is None:
                continue  # it was deleted while others were built
            before = known.get(name)
            if before is None or before[0] is not record:
                before = record, _brief(record, self._jobs.revision(name))
                await self._runtime.checkpoint(answers=True)
            found[name] = before
        self._briefs = found
        return JobBriefs(jobs=[brief for _, brief in found.values()])

    async def push(self, name: str, change: PushChange, writer: str) -> JobIntents:
        """Push a specification to a part of the tasks."""
        write = push_change(name, change, writer, self._runtime.date())
        return self._shown(await self._control.write(write))

    async def size(
        self, name: str, change: SizeChange, writer: str, also: Sequence[Operation] = ()
    ) -> JobIntents:
        """Set how many tasks are wanted; see `resize`."""
        return self._shown(await self.resize(name, change, writer, also))

    async def resize(
        self, name: str, change: SizeChange, writer: str, also: Sequence[Operation] = ()
    ) -> JobRecord:
        """Write a size, and `also` in the same transaction.

        The answer does not include the composed effect on the job.
        """
        write = size_change(name, change, writer, self._runtime.date())
        return await self._control.write(write, also=also)

    async def canary(self, name: str, change: CanaryChange, writer: str) -> JobIntents:
        """Run a variant of the job on some tasks for a limited time."""
        write = canary_change(name, change, writer, self._runtime.date())
        return self._shown(await self._control.write(write))

    async def hold(self, name: str, change: HoldChange, writer: str) -> JobIntents:
        """Hold a job: postpone all changes that intents request, for a limited time."""
        record = await self._control.note(
            name, Dimension.HOLD, HoldIntent(), change, writer, lasts_s=change.lasts_s
        )
        return self._shown(record)

    async def infrastructure(
        self, name: str, change: InfrastructureChange, writer: str
    ) -> JobIntents:
        """Set the runtime that the next push starts with."""
        value = InfrastructureIntent(runtime=change.runtime)
        return self._shown(
            await self._control.note(name, Dimension.INFRASTRUCTURE, value, change, writer)
        )

    async def withdraw(
        self, name: str, dimension: str, change: IntentChange, writer: str
    ) -> JobIntents:
        """End a canary or a hold before its time."""
        if dimension not in WITHDRAWABLE:
            names = " or ".join(WITHDRAWABLE)
            raise InvalidInput(
                f"the {dimension} of job {name!r} cannot be withdrawn, only its {names}",
                hint="write another one instead",
            )
        record = await self._control.note(name, Dimension(dimension), None, change, writer)
        return self._shown(record)

    def _shown(self, record: JobRecord) -> JobIntents:
        now = Moment(self._runtime.date(), self._runtime.now())
        return _effects(record, self._claims_of(record.name), now)


def _effects(record: JobRecord, claims: Claims | None, now: Moment) -> JobIntents:
    record = with_rollout(record)
    spec = unified_summary(record, DecisionInput({}, now, claims=claims or ()))
    wanted = Counter((task.version, task.why) for task in spec.tasks.values())
    running = Counter(task.version for task in record.tasks if task.phase is TaskPhase.RUNNING)
    versions = [
        TaskCount(version=version, wanted=count, running=running[version], why=why)
        for (version, why), count in sorted(wanted.items())
    ]
    rest = sorted(running.keys() - {version for version, _ in wanted})
    versions += [
        TaskCount(version=version, wanted=0, running=running[version], why=_TO_CHANGE)
        for version in rest
    ]
    of_version = Counter(task.version for task in spec.tasks.values())
    is_reached = of_version == running
    found = [_explained(view, record, now, is_reached) for view in views(record, spec)]
    return JobIntents(job=record.name, intents=found, size=spec.size, versions=versions)


def _brief(record: JobRecord, revision: int) -> JobBrief:
    policy, status = record.spec.autoscale, summarize(record)
    return JobBrief(
        name=record.name,
        entitlement=record.spec.entitlement,
        tasks=record.spec.tasks,
        healthy=status.healthy,
        intents={dimension: intent.version for dimension, intent in record.intents.items()},
        autoscale=None if policy is None or record.stopping else policy.mode,
        revision=revision,
    )


def _explained(view: IntentView, record: JobRecord, now: Moment, is_reached: bool) -> IntentView:
    """Return a push with the scheduler's explanation, unless another intent holds it up.

    A push that was reached waits for nothing, also while tasks are added: its result is in the
    job's status.
    """
    if view.dimension != Dimension.PUSH or view.waits_for:
        return view
    rollout = record.rollout
    is_ended = rollout is not None and rollout.done
    is_halted = rollout is not None and rollout.halted
    is_return = rollout is not None and bool(rollout.returns_from)  # its text reports a past event
    is_over = (is_reached or is_ended or is_return) and not is_halted
    words = "it is paused" if record.paused else "" if is_over else describe_progress(record, now)
    return replace(view, waits_for=words)
