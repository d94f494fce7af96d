"""The checker of intents in a simulated region.

After every event it compares the intents granted to a job's writers with the versions that its
tasks are to run. They must match exactly, unless an operation is under way. It has its own
arithmetic for that (docs/intents.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, TaskPhase, TaskRecord
from control_plane.api.machines import MachineState
from control_plane.api.operations import OperationKind, OperationState
from control_plane.roles import ControlPlane

if TYPE_CHECKING:
    from vm_lab.region.clients import OwnedJob
    from vm_lab.region.plane import PlaneLife
    from vm_lab.region.seed import SimulatedRegion

END_TOLERANCE_S = 10.0
"""Tolerance in seconds around the end of an intent that has a time limit."""


class TaskCounts(NamedTuple):
    """Numbers of tasks of one job."""

    tasks: int
    pushed: int
    """Tasks with the pushed image."""
    canaries: int


@dataclass(slots=True)
class GrantedIntents:
    """The intents granted last to the writers of one job."""

    size: int
    image: str
    """The pushed image."""
    earlier_images: frozenset[str]
    """Images that were pushed before: the other tasks may run them."""
    share: float = 1.0
    canaries: int = 0
    canaries_end: float = 0.0
    held_until: float = 0.0
    written_dimensions: set[str] = field(default_factory=set)
    held_versions: dict[int, int] = field(default_factory=dict)
    """Index of a task → its version, while the job is held."""
    first_runtimes: dict[int, str] = field(default_factory=dict)
    """Version → its first runtime."""

    def wanted_counts(self) -> TaskCounts:
        """Return how many tasks must run the pushed image, and how many are canaries."""
        canaries = min(self.canaries, self.size)
        pushed = min(tasks_of_share(self.share, self.size), self.size - canaries)
        return TaskCounts(self.size, pushed, canaries)


def tasks_of_share(share: float, size: int) -> int:
    """Return how many of `size` tasks a share is, rounded half up (docs/intents.md)."""
    return int(Fraction(f"{share:.6f}") * size + Fraction(1, 2))


def update_expected_size(owned: OwnedJob, now: float) -> None:
    """Make the granted size the one that the other checkers expect; a hold forbids growth."""
    intents, requested, granted = owned.intents, owned.requested, owned.granted
    if intents is None or requested is None or granted is None:
        return
    is_held = now < intents.held_until
    tasks = min(granted.tasks, intents.size) if is_held else intents.size
    owned.requested, owned.granted = replace(requested, tasks=tasks), replace(granted, tasks=tasks)


class IntentChecker:
    """Checks each job with writers after every event that concerns it."""

    def __init__(self, region: SimulatedRegion) -> None:
        self._region = region
        self._scheduled: set[str] = set()
        self.checks: Counter[str] = Counter()
        """Counts of checks: `exact`, `under way` (an operation explains a difference), `failed`."""

    def schedule_checks(self) -> None:
        """Check all jobs with writers as soon as the current event is over."""
        life = self._region.plane.life
        if life is None or life.control_plane is None or life.frozen:
            return
        for name, owned in self._region.clients.jobs.items():
            if owned.intents is not None and name not in self._scheduled:
                self._scheduled.add(name)
                self._region.timeline.after(0.0, self._start_check, life, name)

    def _start_check(self, life: PlaneLife, name: str) -> None:
        self._scheduled.discard(name)
        if life.alive and life.control_plane is not None:
            life.loop.create_task(self._check_job(life.control_plane, name))

    async def _check_job(self, control_plane: ControlPlane, name: str) -> None:
        owned = self._region.clients.jobs[name]
        intents, now = owned.intents, self._region.timeline.now
        if intents is None or owned.granted is None:
            return
        status = await control_plane.get_job(name)
        if self._region.clients.has_pending(f"job {name} "):
            return  # the outcome of the write is unknown until its answer arrives
        if now >= intents.canaries_end:
            intents.canaries = 0
        if now - self._region.checker.undisturbed_since >= END_TOLERANCE_S:
            for rule, text in self._violations(intents, status, now):
                self._region.checker.violate(rule, f"{name}: {text}", name)
        update_expected_size(owned, now)

    def _violations(
        self, intents: GrantedIntents, status: JobStatus, now: float
    ) -> Iterator[tuple[str, str]]:
        """Yield each broken rule, with an explanation."""
        record = status.record
        if intents.canaries and has_failed(record):
            intents.canaries, intents.canaries_end = 0, 0.0
            self.checks["failed"] += 1
        yield from (("last-write", text) for text in lost_writes(intents, record, now))
        yield from (("runtime", text) for text in _changed_runtimes(intents, record))
        if "hold" in _active_dimensions(record):
            yield from (("hold", text) for text in _changes_under_hold(intents, record))
            return
        intents.held_versions = {}
        ends = (intents.canaries_end, intents.held_until)
        if any(abs(now - end) < END_TOLERANCE_S for end in ends):
            return
        if status.phase is JobPhase.STABLE:
            self.checks["exact"] += 1
            wrong = wrong_counts(intents, record, is_plan=False)
        else:
            self.checks["under way"] += 1
            wrong = self._wrong_plan(intents, record)
        yield from (("share", text) for text in wrong)

    def _wrong_plan(self, intents: GrantedIntents, record: JobRecord) -> list[str]:
        """Return how the planned versions differ from the intents, once all intents are composed.

        Differences are excused while a task has to leave its machine.
        """
        tasks = _counted_tasks(record)
        writes = sum(intent.version for intent in record.intents.values())
        if record.composed != writes or len(tasks) != intents.size:
            return []
        machines = [t.placement.machine for t in tasks if t.placement is not None]
        is_settled = len(machines) == len(tasks) and all(map(self._may_stay, machines))
        return wrong_counts(intents, record, is_plan=True) if is_settled else []

    def _may_stay(self, machine: str) -> bool:
        """Return whether tasks may stay on a machine."""
        checked = self._region.checker.machines[machine]
        is_up = checked.state == MachineState.UP and checked.responsive
        return is_up and not checked.in_maintenance


def has_failed(record: JobRecord) -> bool:
    """Return whether the canary ended because one of its tasks failed."""
    canary = record.intents.get("canary")
    return canary is not None and canary.value is None and "it failed on" in canary.reason


def _active_dimensions(record: JobRecord) -> frozenset[str]:
    return frozenset(d for d, intent in record.intents.items() if intent.value is not None)


def lost_writes(intents: GrantedIntents, record: JobRecord, now: float) -> Iterator[str]:
    """Yield the dimensions whose record differs from the last granted write."""
    recorded = {d: intent.value or {} for d, intent in record.intents.items()}
    if "size" in intents.written_dimensions and recorded["size"].get("tasks") != intents.size:
        yield f"the granted size is {intents.size}, the recorded one is {recorded['size']}"
    if "push" in intents.written_dimensions:
        share = recorded["push"].get("share", 1.0)
        if (share, record.spec.image) != (intents.share, intents.image):
            yield (
                f"share {intents.share} of image {intents.image[7:15]} was granted, share {share}"
                f" of {record.spec.image[7:15]} is recorded"
            )
    for dimension, end in {"canary": intents.canaries_end, "hold": intents.held_until}.items():
        is_near, must_be_active = abs(now - end) < END_TOLERANCE_S, now < end
        if not is_near and must_be_active != (dimension in _active_dimensions(record)):
            state = "is missing" if must_be_active else "is still active"
            yield f"the {dimension}, which ends at {end:.1f} s, {state}"


def wrong_counts(intents: GrantedIntents, record: JobRecord, *, is_plan: bool) -> list[str]:
    """Return how the versions that tasks run, or are planned to run, differ from the intents."""
    tasks = _counted_tasks(record)
    versions = [(t.wants or t.version) if is_plan else t.version for t in tasks]
    counts = TaskCounts(
        len(tasks),
        sum(version == record.version for version in versions),
        sum(version in record.trials for version in versions),
    )
    wanted = intents.wanted_counts()
    if counts == wanted:
        return []
    verb = "are to run" if is_plan else "run"
    return [
        f"{counts.pushed} of {counts.tasks} tasks {verb} the pushed image and {counts.canaries}"
        f" are canaries, not {wanted.pushed} of {wanted.tasks} and {wanted.canaries}"
    ]


def _changed_runtimes(intents: GrantedIntents, record: JobRecord) -> Iterator[str]:
    """Yield the versions whose runtime changed during their push."""
    for version, spec in record.specs.items():
        first = intents.first_runtimes.setdefault(version, spec.runtime)
        if first != spec.runtime:
            yield f"version {version} had runtime {first!r}, now {spec.runtime!r}"


def _changes_under_hold(intents: GrantedIntents, record: JobRecord) -> list[str]:
    """Return the first task that changed under the hold.

    Updates that began before the hold may continue.
    """
    tasks, before = _counted_tasks(record), intents.held_versions
    settled = {task.index: task.version for task in tasks if not _is_changing(task)}
    for index in before.keys() & settled.keys():
        if before[index] != settled[index]:
            return [f"task {index} came from version {before[index]} to {settled[index]}"]
    indexes = {task.index for task in tasks}
    remaining = {index: version for index, version in before.items() if index in indexes}
    intents.held_versions = remaining | settled
    return []


def _counted_tasks(record: JobRecord) -> list[TaskRecord]:
    """Return the tasks that count: no extra task, and none that is being removed."""
    return [
        t
        for t in record.tasks
        if not t.extra
        and not (t.operation is not None and t.operation.kind is OperationKind.REMOVE)
    ]


def _is_changing(task: TaskRecord) -> bool:
    """Return whether a task is not placed yet, or is being updated."""
    operation = task.operation
    return task.phase is TaskPhase.PENDING or (
        operation is not None
        and operation.state is OperationState.RUNNING
        and operation.kind is OperationKind.UPDATE
    )


def differences_at_rest(
    owned: OwnedJob, status: JobStatus, running: Counter[str], now: float
) -> list[str]:
    """Return differences from the granted intents at rest; `running`: image → copies that run."""
    intents, record = owned.intents, status.record
    if intents is None:
        return []
    if now < max(intents.canaries_end, intents.held_until) + END_TOLERANCE_S:
        return [f"a canary or a hold of job {record.name} is still active"]
    intents.canaries = 0  # its time is over
    differences = [
        *lost_writes(intents, record, float("inf")),
        *wrong_counts(intents, record, is_plan=False),
    ]
    wanted, pushed = intents.wanted_counts(), running[intents.image]
    earlier = sum(n for image, n in running.items() if image in intents.earlier_images)
    is_wrong = (pushed, earlier) != (wanted.pushed, wanted.tasks - wanted.pushed)
    if is_wrong and intents.share < 1.0:
        differences.append(f"{pushed} copies run the pushed image and {earlier} run earlier ones")
    return differences


def expected_spec_of_writers(owned: OwnedJob, record: JobRecord) -> JobSpec | None:
    """Return the specification that an owner expects if other programs write some dimensions."""
    if owned.granted is None:
        return None
    size = record.spec.tasks
    return replace(owned.granted, image=record.spec.image, runtime=record.spec.runtime, tasks=size)
