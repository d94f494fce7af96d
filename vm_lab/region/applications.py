"""TaskControllers of a simulated region, correct and faulty ones, and a checker of their answers.

They use the ready-made controllers of `taskcontrol`, for made-up ensembles and shards. The checker
records each answer. A task that is taken down on purpose without an acknowledgement is a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from control_plane.api.jobs import ControllerRef
from taskcontrol.api import Ack, TaskControlRequest, TaskControlResponse
from taskcontrol.quorum import Quorum
from taskcontrol.shards import Sharded
from taskcontrol.stateless import Stateless
from taskcontrol.windows import Never
from wire.errors import ProtocolError, Unreachable

if TYPE_CHECKING:
    from vm_lab.region.checker import Checker
    from vm_lab.region.plane import PlaneLife

CONTROLLER_KINDS = ("shards", "quorum", "stateless", "never")
CALL_S = 0.02
"""Seconds that a request to a controller takes, and its answer."""
TIMEOUT_S = 5.0
"""Timeout of the control plane for an answer, in seconds."""
ELECTION_S = 4.0
"""Seconds without a leader after the last one was taken down."""
NOTICE_S = 30.0
"""Seconds before a deadline by which its notice must have arrived, if no fault was active."""
REBUILD_S = 120.0
"""Seconds until the replicas of a task that left its job exist on other tasks again."""
_QUIET = Never.of(["00:00-00:05", "00:20-00:25", "00:40-00:45"])


@dataclass(slots=True)
class Acknowledgement:
    """An acknowledgement of an operation on a task."""

    at: float
    honest: bool
    """Whether the controller was not lying (fault `controller-lies`)."""
    kind: str
    """Kind of the operation; `used` once the task was taken down."""


@dataclass(slots=True)
class Application:
    """The owner of one job: its controller, and the state that the controller decides on."""

    job: str
    kind: str
    active_faults: dict[str, int] = field(default_factory=dict)
    """Kind of fault → how many faults of that kind are active."""
    acknowledged: dict[int, Acknowledgement] = field(default_factory=dict)
    """Index of a task → the latest acknowledgement for it."""
    first_notices: dict[str, float] = field(default_factory=dict)
    """Machine → when the first notice about it arrived."""
    serving: set[int] = field(default_factory=set)
    """Listed tasks that still have their shards."""
    replicas: int = 3
    load: float = 0.3
    """CPU use of its tasks, as a share, as the controller of a stateless service measures it."""
    _left_with_replicas: dict[int, float] = field(default_factory=dict)
    """Tasks that left the job and still hold replicas → since when."""
    _leader: int = 0
    _elected_at: float = 0.0

    def shards(self, task: int) -> frozenset[str]:
        """Return the shards of a task; tasks with adjacent indexes have the replicas of a shard."""
        return frozenset(f"s{task - n}" for n in range(self.replicas))

    def answer(self, request: TaskControlRequest, now: float) -> TaskControlResponse:
        """Return the answer of its controller, and record it."""
        for notice in request.advance_notices:
            self.first_notices.setdefault(notice.machine, now)
        for done in request.completed:
            acknowledged = self.acknowledged.get(done.task)
            stays = done.kind == "remove" and done.outcome != "done"
            if stays and acknowledged is not None and acknowledged.kind == "remove":
                del self.acknowledged[done.task]
        self._rebuild(request, now)
        honest = not self.active_faults.get("controller-lies")
        response = self._decide(request, now) if honest else _lying_answer(request)
        known = {operation.id: operation for operation in request.request}
        for ack in response.ack:
            operation = known.get(ack.operation if isinstance(ack, Ack) else ack)
            if operation is not None:
                self.acknowledged[operation.task] = Acknowledgement(now, honest, operation.kind)
                if operation.kind == "remove":  # its shards move to other tasks first
                    self.serving.discard(operation.task)
        return response

    def _decide(self, request: TaskControlRequest, now: float) -> TaskControlResponse:
        match self.kind:
            case "shards":
                holders = {o.task for o in request.request} | request.down | self.serving
                held = {task: self.shards(task) for task in holders}
                return Sharded(rebuild_s=REBUILD_S).answer(request, held)
            case "quorum":
                return Quorum().answer(request, self._elected_leader(request, now))
            case "never":
                return Stateless(at_most=0.5).answer(_QUIET.left(request), self.load)
        return Stateless(at_most=0.5).answer(request, self.load)

    def _rebuild(self, request: TaskControlRequest, now: float) -> None:
        """Move replicas of tasks that left the job to other tasks after `REBUILD_S` seconds."""
        gone = request.gone(self.serving)
        self._left_with_replicas = {task: self._left_with_replicas.get(task, now) for task in gone}
        for task, since in self._left_with_replicas.items():
            if now - since >= REBUILD_S:
                self.serving.discard(task)

    def _elected_leader(self, request: TaskControlRequest, now: float) -> int | None:
        if self._leader in request.down or self._leader not in self.serving:
            others = sorted(self.serving - request.down)
            self._leader, self._elected_at = (others[0] if others else 0), now
        return self._leader if now - self._elected_at >= ELECTION_S else None


def _lying_answer(request: TaskControlRequest) -> TaskControlResponse:
    """Acknowledge everything twice, with wrong operations, and operations that do not exist."""
    ids = [operation.id for operation in request.request]
    wrong = [Ack(operation=name, instead="reboot") for name in ids]
    return TaskControlResponse(ack=[*ids, *wrong, "job0-0.1", "", *ids])


class Applications:
    """All owners with a controller, by job."""

    def __init__(self, checker: Checker, replicas: int) -> None:
        """Each shard of an owner has `replicas` replicas, each on another task."""
        self._checker, self._replicas_of_shard = checker, replicas
        self.by_job: dict[str, Application] = {}

    def add(self, job: str, kind: str) -> ControllerRef:
        """Add a controller for a job, and return the reference for its job file."""
        self.by_job[job] = Application(job, kind, replicas=self._replicas_of_shard)
        return ControllerRef(url="https://10.0.0.1:7450", name=kind, failure_wait_s=120.0)

    def caller(
        self, life: PlaneLife
    ) -> Callable[[ControllerRef, TaskControlRequest], Awaitable[TaskControlResponse]]:
        """Return the function that one life of the control plane calls controllers with."""

        async def call(_: ControllerRef, request: TaskControlRequest) -> TaskControlResponse:
            application = self.by_job[request.job_handle]
            await asyncio.sleep(CALL_S)
            if application.active_faults.get("controller-down"):
                await asyncio.sleep(TIMEOUT_S - CALL_S)
                raise Unreachable("the controller does not answer")
            if application.active_faults.get("controller-garbage"):
                raise ProtocolError("the controller answers with something else")
            response = application.answer(request, self._checker.now)
            slow = application.active_faults.get("controller-slow")
            await asyncio.sleep(TIMEOUT_S * 0.9 if slow else CALL_S)
            if not life.alive:
                raise asyncio.CancelledError
            return response

        return call

    # -- the checker

    def record_listed(self, job: str, now: Collection[str]) -> None:
        """Record which tasks of a job are listed for clients now."""
        application = self.by_job.get(job)
        if application is not None:
            tasks = {int(task.rpartition("-")[2]) for task in now}
            acknowledged = application.acknowledged
            leaving = {task for task, ack in acknowledged.items() if ack.kind == "remove"}
            application.serving |= tasks - leaving
            for task in tasks & acknowledged.keys():
                if acknowledged[task].kind == "used":
                    del acknowledged[task]

    def check_taken_down(
        self, job: str, voluntary: Mapping[str, str], left: Collection[str]
    ) -> None:
        """Check the tasks that were taken down on purpose; `left` are still listed.

        `voluntary` maps each task to its machine.
        """
        application = self.by_job.get(job)
        if application is None:
            return
        serving = {int(task.rpartition("-")[2]) for task in left}
        for task, machine in voluntary.items():
            index = int(task.rpartition("-")[2])
            acknowledged = application.acknowledged.get(index)
            if acknowledged is None or acknowledged.kind == "used":
                self._checker.violate(
                    "acknowledged",
                    f"{task} is taken from {machine}, and its controller ({application.kind})"
                    " did not acknowledge that",
                    task,
                )
                continue
            if application.kind == "shards" and acknowledged.honest:
                self._check_replicas(application, index, serving)
            application.acknowledged[index] = replace(acknowledged, kind="used")

    def _check_replicas(self, application: Application, task: int, serving: set[int]) -> None:
        """Check that no operation takes a second replica of a shard."""
        for other in sorted(application.serving - serving - {task}):
            shared = application.shards(task) & application.shards(other)
            if shared:
                self._checker.violate(
                    "second-replica",
                    f"{application.job}-{task} is taken while {application.job}-{other} is away:"
                    f" {', '.join(sorted(shared))} lost two",
                    f"{application.job} {task} {other}",
                )

    def check_notice(self, machine: str, jobs: Collection[str], announced_at: float) -> None:
        """Check at a deadline that every controller with tasks there got a notice."""
        for job in sorted(jobs):
            application = self.by_job.get(job)
            if application is None or any(application.active_faults.values()):
                continue
            if machine not in application.first_notices:
                self._checker.violate(
                    "notice",
                    f"the deadline of {machine} passed, announced at {announced_at:.1f} s, and the"
                    f" controller of {job} got no notice",
                    f"{machine} {job}",
                )
