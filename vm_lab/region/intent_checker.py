"""The checker of intents in a simulated region.

After every event it compares the intents granted to a job's writers with the versions that its
tasks are to run. They must match exactly, unless an operation is under way. It has its own
arithmetic for that (docs/intents.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec.structs import replace

from control_plane.api.jobs import JobPhase, JobRecord, JobSpec, JobStatus, TaskPhase, TaskRecord
from control_plane.api.machines import MachineState
from control_plane.api.operations import OperationKind, OperationState
from control_plane.roles import ControlPlane

if TYPE_CHECKING:
    from vm_lab.region.clients import Owned
    from vm_lab.region.plane import PlaneLife
    from vm_lab.region.seed import SimulatedRegion

ENDS_S = 10.0
"""Tolerance in seconds around the end of an intent that has a time limit."""


@dataclass(slots=True)
class GrantedIntents:
    """The intents granted last to the writers of one job."""

    size: int
    image: str
    """The pushed image."""
    stable: frozenset[str]
    """Images that the other tasks may run: all that were pushed earlier."""
    share: float = 1.0
    canaries: int = 0
    canaries_end: float = 0.0
    held_until: float = 0.0
    owned: set[str] = field(default_factory=set)
    """Dimensions that have been written."""
    versions: dict[int, int] = field(default_factory=dict)
    """Index of a task under the hold → its version."""
    runtimes: dict[int, str] = field(default_factory=dict)
    """Version → its first runtime."""

    def counts(self) -> tuple[int, int]:
        """Return how many tasks must run the pushed image, and how many are canaries."""
        trial = min(self.canaries, self.size)
        return min(half_up(self.share, self.size), self.size - trial), trial


def half_up(share: float, size: int) -> int:
    """Return how many of `size` tasks a share is, by the rule in docs/intents.md."""
    return int(Fraction(f"{share:.6f}") * size + Fraction(1, 2))


def in_force(owned: Owned, now: float) -> None:
    """Make the size in force the one that the other checkers expect."""
    intents, asked, granted = owned.intents, owned.asked, owned.granted
    if intents is None or asked is None or granted is None:
        return
    held = now < intents.held_until
    tasks = min(granted.tasks, intents.size) if held else intents.size
    owned.asked, owned.granted = replace(asked, tasks=tasks), replace(granted, tasks=tasks)


class IntentChecker:
    """Checks each job with writers after every event that concerns it."""

    def __init__(self, region: SimulatedRegion) -> None:
        self._region = region
        self._due: set[str] = set()
        self.looks: Counter[str] = Counter()
        """Counts of checks: `exact`, `under way` (an operation explains a difference), `failed`."""

    def happened(self) -> None:
        """Check all jobs with writers as soon as the current event is over."""
        life = self._region.plane.life
        if life is None or life.control_plane is None or life.frozen:
            return
        for name, owned in self._region.clients.jobs.items():
            if owned.intents is not None and name not in self._due:
                self._due.add(name)
                self._region.timeline.after(0.0, self._look, life, name)

    def _look(self, life: PlaneLife, name: str) -> None:
        self._due.discard(name)
        if life.alive and life.control_plane is not None:
            life.loop.create_task(self._judge(life.control_plane, name))

    async def _judge(self, cp: ControlPlane, name: str) -> None:
        owned = self._region.clients.jobs[name]
        intents, now = owned.intents, self._region.timeline.now
        if intents is None or owned.granted is None:
            return
        status = await cp.get_job(name)
        if self._region.clients.waits(f"job {name} "):
            return  # the outcome of the write is unknown until its answer arrives
        if now >= intents.canaries_end:
            intents.canaries = 0
        for rule, text in self._found(intents, status, now):
            self._region.checker.violate(rule, f"{name}: {text}", name)
        in_force(owned, now)

    def _found(
        self, intents: GrantedIntents, status: JobStatus, now: float
    ) -> list[tuple[str, str]]:
        record, since = status.record, now - self._region.checker.undisturbed_since
        if since < ENDS_S:
            return []
        if intents.canaries and has_failed(record):
            intents.canaries, intents.canaries_end = 0, 0.0
            self.looks["failed"] += 1
        found = [("last-write", text) for text in unwritten(intents, record, now)]
        found += [("runtime", text) for text in _runtimes(intents, record)]
        if "hold" in _in_record(record):
            return found + [("hold", text) for text in _held(intents, record)]
        intents.versions = {}
        if abs(now - intents.canaries_end) < ENDS_S or abs(now - intents.held_until) < ENDS_S:
            return found
        if status.phase is JobPhase.STABLE:
            self.looks["exact"] += 1
            found += [("share", text) for text in inexact(intents, record, is_plan=False)]
        else:
            self.looks["under way"] += 1
            found += [("share", text) for text in self._planned(intents, record)]
        return found

    def _planned(self, intents: GrantedIntents, record: JobRecord) -> list[str]:
        """Return how the planned versions differ from the intents, once all intents are composed.

        Differences are excused while a task has to leave its machine.
        """
        staying = _staying(record)
        writes = sum(intent.version for intent in record.intents.values())
        if record.composed != writes or len(staying) != intents.size:
            return []
        machines = [t.placement.machine for t in staying if t.placement is not None]
        standings = [self._region.checker.standings[name] for name in machines]
        is_settled = len(machines) == len(staying) and all(
            s.state == MachineState.UP and s.sound and not s.drained for s in standings
        )
        return inexact(intents, record, is_plan=True) if is_settled else []


def has_failed(record: JobRecord) -> bool:
    """Return whether the canary ended because one of its tasks failed."""
    canary = record.intents.get("canary")
    return canary is not None and canary.value is None and "it failed on" in canary.reason


def _in_record(record: JobRecord) -> frozenset[str]:
    return frozenset(d for d, intent in record.intents.items() if intent.value is not None)


def unwritten(intents: GrantedIntents, record: JobRecord, now: float) -> list[str]:
    """Return the dimensions whose record differs from the last granted write."""
    recorded = {d: intent.value or {} for d, intent in record.intents.items()}
    there, found = _in_record(record), list[str]()
    if "size" in intents.owned and recorded["size"].get("tasks") != intents.size:
        found.append(f"a size of {intents.size} was granted, and there is {recorded['size']}")
    if "push" in intents.owned:
        share = recorded["push"].get("share", 1.0)
        if (share, record.spec.image) != (intents.share, intents.image):
            found.append(f"{intents.share} of {intents.image[7:15]} was granted, not {share}")
    ends = {"canary": intents.canaries_end, "hold": intents.held_until}
    for dimension, end in ends.items():
        is_near = abs(now - end) < ENDS_S
        if not is_near and (now < end) != (dimension in there):
            found.append(f"the {dimension} ends at {end:.1f} s, and it is there: {now >= end}")
    return found


def inexact(intents: GrantedIntents, record: JobRecord, *, is_plan: bool) -> list[str]:
    """Return how the versions that tasks run, or are planned to run, differ from the intents."""
    staying = _staying(record)
    versions = [(t.wants or t.version) if is_plan else t.version for t in staying]
    pushed = sum(1 for version in versions if version == record.version)
    trial = sum(1 for version in versions if version in record.trials)
    wanted = intents.counts()
    if (len(staying), pushed, trial) == (intents.size, *wanted):
        return []
    verb = "are to run" if is_plan else "run"
    return [
        f"{pushed} of {len(staying)} tasks {verb} what is pushed and {trial} are canaries, not"
        f" {wanted[0]} of {intents.size} and {wanted[1]}"
    ]


def _runtimes(intents: GrantedIntents, record: JobRecord) -> list[str]:
    """Return the versions whose runtime changed during their push."""
    found = []
    for version, spec in record.specs.items():
        first = intents.runtimes.setdefault(version, spec.runtime)
        if first != spec.runtime:
            found.append(f"version {version} had runtime {first!r}, now {spec.runtime!r}")
    return found


def _held(intents: GrantedIntents, record: JobRecord) -> list[str]:
    """Return the tasks that changed under the hold; updates that began before it may continue."""
    still = {t.index: t.version for t in _staying(record) if not _is_changing(t)}
    for index in intents.versions.keys() & still.keys():
        if intents.versions[index] != still[index]:
            return [f"task {index} came from version {intents.versions[index]} to {still[index]}"]
    there = {t.index for t in _staying(record)}
    intents.versions = {i: v for i, v in intents.versions.items() if i in there} | still
    return []


def _staying(record: JobRecord) -> list[TaskRecord]:
    """Return the tasks that count: no extra task, and none that is being removed."""
    return [
        t
        for t in record.tasks
        if not t.extra
        and not (t.operation is not None and t.operation.kind is OperationKind.REMOVE)
    ]


def _is_changing(task: TaskRecord) -> bool:
    operation = task.operation
    return task.phase is TaskPhase.PENDING or (
        operation is not None
        and operation.state is OperationState.RUNNING
        and operation.kind is OperationKind.UPDATE
    )


def at_rest(owned: Owned, status: JobStatus, running: Counter[str], now: float) -> list[str]:
    """Return differences from the granted intents at rest; `running`: image → copies that run."""
    intents, record = owned.intents, status.record
    if intents is None:
        return []
    if now < max(intents.canaries_end, intents.held_until) + ENDS_S:
        return [f"a canary or a hold of job {record.name} is still active"]
    intents.canaries = 0  # its time is over
    found = unwritten(intents, record, float("inf")) + inexact(intents, record, is_plan=False)
    pushed, _ = intents.counts()
    others = sum(n for digest, n in running.items() if digest in intents.stable)
    there = running[intents.image]
    if (there, others) != (pushed, intents.size - pushed) and intents.share < 1.0:
        found.append(f"{there} copies run what is pushed and {others} what was before")
    return found


def granted_spec(owned: Owned, record: JobRecord) -> JobSpec | None:
    """Return the specification that an owner expects if other programs write some dimensions."""
    if owned.granted is None:
        return None
    size = record.spec.tasks
    return replace(owned.granted, image=record.spec.image, runtime=record.spec.runtime, tasks=size)
