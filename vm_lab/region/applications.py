"""TaskControllers of a simulated region, good ones and bad, and a checker of their answers.

The ready controllers of `taskcontrol` answer here, for made-up ensembles and shards. The checker
records each of their answers: taking a task down on purpose without an acknowledgement is a
violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
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

KINDS = ("shards", "quorum", "stateless", "never")
CALL_S = 0.02
TIMEOUT_S = 5.0
ELECTION_S = 4.0
"""Seconds without a leader after the last one went."""
NOTICE_S = 30.0
"""Seconds before a deadline by which a notice must have come, if there was no trouble meanwhile."""
REBUILD_S = 120.0
"""Seconds in which replicas are missing of a task that was given up while it did not serve."""
_QUIET = Never.of(["00:00-00:05", "00:20-00:25", "00:40-00:45"])


@dataclass(slots=True)
class Said:
    """What was acknowledged for a task, and not used yet."""

    at: float
    honest: bool
    kind: str


@dataclass(slots=True)
class Application:
    """One job's owner: a controller, and what it is about."""

    job: str
    kind: str
    troubles: dict[str, int] = field(default_factory=dict)
    """What is wrong with it, and how many faults say so."""
    said: dict[int, Said] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    """Machine → when the first notice about it came."""
    serving: set[int] = field(default_factory=set)
    """Tasks that were listed, and whose shards have not left them."""
    calls: int = 0
    replicas: int = 3
    load: float = 0.3
    """How busy its tasks are, as a controller of a stateless service measures it."""
    _given_up: dict[int, float] = field(default_factory=dict)
    """Tasks that hold replicas and are not the job's any more → since when."""
    _leader: int = 0
    _elected_at: float = 0.0

    def shards(self, task: int) -> frozenset[str]:
        """Return what a task holds: each shard has its replicas on neighbours."""
        return frozenset(f"s{task - n}" for n in range(self.replicas))

    def answer(self, request: TaskControlRequest, now: float) -> TaskControlResponse:
        """Answer as its controller does, and record the answer."""
        self.calls += 1
        for notice in request.advance_notices:
            self.told.setdefault(notice.machine, now)
        for done in request.completed:
            said = self.said.get(done.task)
            stays = done.kind == "remove" and done.outcome != "done"
            if stays and said is not None and said.kind == "remove":
                del self.said[done.task]
        self._rebuild(request, now)
        honest = not self.troubles.get("controller-lies")
        response = self._decide(request, now) if honest else _everything(request)
        known = {operation.id: operation for operation in request.request}
        for ack in response.ack:
            operation = known.get(ack.operation if isinstance(ack, Ack) else ack)
            if operation is not None:
                self.said[operation.task] = Said(now, honest, operation.kind)
                if operation.kind == "remove":  # its shards go elsewhere first
                    self.serving.discard(operation.task)
        return response

    def _decide(self, request: TaskControlRequest, now: float) -> TaskControlResponse:
        match self.kind:
            case "shards":
                holders = {o.task for o in request.request} | request.down | self.serving
                held = {task: self.shards(task) for task in holders}
                return Sharded(rebuild_s=REBUILD_S).answer(request, held)
            case "quorum":
                return Quorum().answer(request, self._leads(request, now))
            case "never":
                return Stateless(at_most=0.5).answer(_QUIET.left(request), self.load)
        return Stateless(at_most=0.5).answer(request, self.load)

    def _rebuild(self, request: TaskControlRequest, now: float) -> None:
        """Move the replicas of tasks that left the job to other tasks after `REBUILD_S`."""
        gone = request.gone(self.serving)
        self._given_up = {task: self._given_up.get(task, now) for task in gone}
        for task, since in self._given_up.items():
            if now - since >= REBUILD_S:
                self.serving.discard(task)

    def _leads(self, request: TaskControlRequest, now: float) -> int | None:
        if self._leader in request.down or self._leader not in self.serving:
            others = sorted(self.serving - request.down)
            self._leader, self._elected_at = (others[0] if others else 0), now
        return self._leader if now - self._elected_at >= ELECTION_S else None


def _everything(request: TaskControlRequest) -> TaskControlResponse:
    """Answer as a liar does: everything, twice, as it should not be, and what was not asked."""
    ids = [operation.id for operation in request.request]
    wrong = [Ack(operation=name, instead="reboot") for name in ids]
    return TaskControlResponse(ack=[*ids, *wrong, "job0-0.1", "", *ids])


class Applications:
    """All owners with a controller, by job."""

    def __init__(self, checker: Checker, replicas: int) -> None:
        """Each shard of an owner is to be on so many tasks."""
        self._checker, self._replicas_of_shard = checker, replicas
        self.of: dict[str, Application] = {}

    def own(self, job: str, kind: str) -> ControllerRef:
        """Add a controller for a job; returns the reference for its job file."""
        self.of[job] = Application(job, kind, replicas=self._replicas_of_shard)
        return ControllerRef(url="https://10.0.0.1:7450", name=kind, failure_wait_s=120.0)

    def caller(
        self, life: PlaneLife
    ) -> Callable[[ControllerRef, TaskControlRequest], Awaitable[TaskControlResponse]]:
        """Return what makes the calls of one life of the control plane."""

        async def call(_: ControllerRef, request: TaskControlRequest) -> TaskControlResponse:
            application = self.of[request.job_handle]
            await asyncio.sleep(CALL_S)
            if application.troubles.get("controller-down"):
                await asyncio.sleep(TIMEOUT_S - CALL_S)
                raise Unreachable("the controller does not answer")
            if application.troubles.get("controller-garbage"):
                raise ProtocolError("the controller answers with something else")
            response = application.answer(request, self._checker.now)
            slow = application.troubles.get("controller-slow")
            await asyncio.sleep(TIMEOUT_S * 0.9 if slow else CALL_S)
            if not life.alive:
                raise asyncio.CancelledError
            return response

        return call

    # -- the checker

    def listed(self, job: str, now: Collection[str]) -> None:
        """Record which tasks serve."""
        application = self.of.get(job)
        if application is not None:
            tasks = {int(task.rpartition("-")[2]) for task in now}
            leaving = {task for task, said in application.said.items() if said.kind == "remove"}
            application.serving |= tasks - leaving
            for task in tasks & application.said.keys():
                if application.said[task].kind == "used":
                    del application.said[task]

    def taken(self, job: str, voluntary: Mapping[str, str], left: Collection[str]) -> None:
        """Record that tasks which were well are not listed any more, and which still are."""
        application = self.of.get(job)
        if application is None:
            return
        serving = {int(task.rpartition("-")[2]) for task in left}
        for task, machine in voluntary.items():
            index = int(task.rpartition("-")[2])
            said = application.said.get(index)
            if said is None or said.kind == "used":
                self._checker.violate(
                    "acknowledged",
                    f"{task} is taken from {machine}, and its controller ({application.kind})"
                    " did not acknowledge that",
                    task,
                )
                continue
            if application.kind == "shards" and said.honest:
                self._replicas(application, index, serving)
            application.said[index] = Said(said.at, said.honest, "used")

    def _replicas(self, application: Application, task: int, serving: set[int]) -> None:
        """No shard is without a second replica because of an operation."""
        for other in sorted(application.serving - serving - {task}):
            shared = application.shards(task) & application.shards(other)
            if shared:
                self._checker.violate(
                    "second-replica",
                    f"{application.job}-{task} is taken while {application.job}-{other} is away:"
                    f" {', '.join(sorted(shared))} lost two",
                    f"{application.job} {task} {other}",
                )

    def overdue(self, machine: str, jobs: Collection[str], announced_at: float) -> None:
        """Check at a deadline that every controller with tasks there got a notice."""
        for job in sorted(jobs):
            application = self.of.get(job)
            if application is None or any(application.troubles.values()):
                continue
            if machine not in application.told:
                self._checker.violate(
                    "notice",
                    f"the deadline of {machine} came, announced at {announced_at:.1f} s, and the"
                    f" controller of {job} was not told",
                    f"{machine} {job}",
                )
