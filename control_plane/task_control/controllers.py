"""Calls the TaskControllers of all jobs, one call at a time per job.

This module decides nothing: the scheduler supplies the questions and evaluates the answers. All
state is in memory; after a restart, the controllers are called again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from control_plane.api.jobs import ControllerRef
from control_plane.api.operations import JobEvent
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.workers import Pace, Workers
from control_plane.task_control.core.talk import ControllerAnswer, Question, soonest_try_s
from taskcontrol.api import (
    Ack,
    CompletedOperation,
    TaskControlRequest,
    TaskControlResponse,
)
from wire.errors import TwineError, Unreachable

log = logging.getLogger(__name__)
CallController = Callable[[ControllerRef, TaskControlRequest], Awaitable[TaskControlResponse]]
"""Makes one call, bounded in time and size; raises `TwineError`."""
BLOCK = 1000
"""Numbers of calls that are reserved at once: one write for this many calls."""
AGAIN_S = 10.0
"""A waiting request is repeated after this time, even if nothing changed."""
_GAP_S = 0.2
_RETRY_S, _RETRY_MAX_S = 1.0, 60.0
_REPORTED_MAX = 1000
"""Ended operations of one call; older ones are in the job's log."""
_AT_ONCE = 32


async def no_controller(ref: ControllerRef, _: TaskControlRequest) -> TaskControlResponse:
    """Raise `Unreachable`: for control planes that cannot call controllers."""
    raise Unreachable(f"this control plane cannot call controllers such as {ref.name}")


@dataclass(slots=True)
class _Talk:
    """The conversation with the controller of one job."""

    ref: ControllerRef
    question: Question | None = None
    """The present question; None: the scheduler has set none since the last answer."""
    answered_question: Question = field(default_factory=Question)
    """The last question that was answered."""
    completed: list[JobEvent] = field(default_factory=list)
    answer: ControllerAnswer = field(default_factory=ControllerAnswer)
    reported: int = 0
    """Number of the last event that was reported to the controller."""
    next: int = 0
    end: int = 0
    """Numbers of calls that may be used: from `next`, below `end`."""
    began: float = 0.0
    answered_at: float = float("-inf")
    since: float = 0.0
    """Since when calls fail."""
    failures: int = 0
    trouble: str = ""
    unknown_acks: int = 0
    """Acknowledgements of operations that were not in the request."""


class Controllers:
    """All conversations; `run` makes the calls."""

    def __init__(self, runtime: Runtime, call: CallController) -> None:
        self._runtime, self._call = runtime, call
        self._talks: dict[str, _Talk] = {}
        self._listeners: list[Callable[[str], None]] = []
        pace = Pace(limit=_AT_ONCE, gather_s=_GAP_S)
        self._workers = Workers(runtime, "task control", self._work, pace)

    def listen(self, answered: Callable[[str], None]) -> None:
        """Call `answered(job)` after each answer."""
        self._listeners.append(answered)

    async def run(self) -> None:
        """Make calls until cancelled."""
        await self._workers.run()

    # -- for the scheduler

    def answer(self, job: str) -> ControllerAnswer:
        """Return the last answer of a job's controller."""
        talk = self._talks.get(job)
        return talk.answer if talk is not None else ControllerAnswer()

    def knows(self, job: str) -> bool:
        """Return whether a conversation with the job's controller has begun."""
        return job in self._talks

    def begin(
        self, job: str, ref: ControllerRef, reported: int, missed: Sequence[JobEvent]
    ) -> None:
        """Begin a conversation; `missed` are the events after the last `reported` one."""
        self._talks[job] = _Talk(
            ref,
            reported=reported,
            completed=list(missed)[-_REPORTED_MAX:],
            began=self._runtime.now(),
        )

    def age_s(self, job: str) -> float:
        """Return the age of a conversation in seconds."""
        return self._runtime.now() - self._talks[job].began

    def needs_numbers(self, job: str) -> bool:
        """Return whether the next call has no number yet."""
        talk = self._talks.get(job)
        return talk is not None and talk.next >= talk.end

    def number(self, job: str, first: int, end: int) -> None:
        """Reserve the numbers from `first` on, below `end`, for calls of a job."""
        talk = self._talks[job]
        talk.next, talk.end = first, end

    def reported(self, job: str) -> int:
        """Return the number of the last event that was reported to the controller."""
        talk = self._talks.get(job)
        return talk.reported if talk is not None else 0

    def ended(self, job: str, events: Sequence[JobEvent]) -> None:
        """Record ended operations, to report them in the next call."""
        talk = self._talks.get(job)
        if talk is not None and events:
            talk.completed = [*talk.completed, *events][-_REPORTED_MAX:]

    def ask(self, job: str, ref: ControllerRef, question: Question) -> None:
        """Set the question to a controller; calls it if the question is new or a request waits."""
        talk = self._talks[job]
        if talk.ref != ref:  # another controller: answers of the former one do not count
            talk.ref, talk.answer, talk.answered_question = ref, ControllerAnswer(), Question()
            talk.failures, talk.trouble = 0, ""
        talk.question = question
        if talk.failures:  # the next try is scheduled; a nearer deadline makes it earlier
            soon_s = soonest_try_s(question, self._runtime.date())
            if soon_s is not None:
                self._workers.wake_at(job, self._runtime.now() + soon_s)
            return
        due_s = self._due_s(talk)
        if due_s == 0.0:
            self._workers.wake(job)
        elif due_s is not None:
            self._workers.wake_at(job, self._runtime.now() + due_s)

    def forget(self, job: str) -> None:
        """End a conversation."""
        self._talks.pop(job, None)
        self._workers.forget(job)

    def note(self, job: str) -> str:
        """Describe the state of the conversation; empty: there is none."""
        talk = self._talks.get(job)
        if talk is None:
            return ""
        controller = f"controller {talk.ref.name} at {talk.ref.url}"
        if talk.failures:
            since_s = self._runtime.now() - talk.since
            calls = f"{talk.failures} call{'s' if talk.failures > 1 else ''}"
            return f"{controller} did not answer {calls} in {since_s:.0f} s: {talk.trouble}"
        if not talk.answer.by:
            return f"{controller} has not been called yet"
        ago_s = self._runtime.now() - talk.answered_at
        unknown = (
            f"; {talk.unknown_acks} acknowledgements were for unknown operations"
            if talk.unknown_acks
            else ""
        )
        return (
            f"{controller} answered {ago_s:.0f} s ago: {len(talk.answer.acks)} of"
            f" {len(talk.answered_question.request)} acknowledged{unknown}"
        )

    # -- calls

    def _due_s(self, talk: _Talk) -> float | None:
        """Return the seconds until the next call; None: none is needed."""
        if talk.question is None or talk.next >= talk.end:
            return None
        if talk.failures:
            return 0.0
        if talk.question != talk.answered_question or talk.completed:
            return 0.0
        if talk.question.request:
            return max(0.0, talk.answered_at + AGAIN_S - self._runtime.now())
        return None

    async def _work(self, job: str) -> float | None:
        """Make a call, if one is due; return the seconds until the next round."""
        talk = self._talks.get(job)
        due_s = self._due_s(talk) if talk is not None else None
        if talk is None or due_s is None or due_s > 0:
            return due_s
        question, completed, ref, number = talk.question, list(talk.completed), talk.ref, talk.next
        assert question is not None
        talk.next += 1
        request = _request(job, question, completed, number, self._runtime.date())
        try:
            response = await self._call(ref, request)
        except TwineError as e:
            return self._failed(job, talk, ref, str(e))
        if self._talks.get(job) is not talk or talk.ref != ref:
            return 0.0
        self._answered(talk, request, response)
        talk.answered_question, talk.question = question, None
        if completed:  # the list may have grown during the call, and lost its oldest events
            talk.reported = completed[-1].seq
            talk.completed = [event for event in talk.completed if event.seq > talk.reported]
        for answered in self._listeners:
            answered(job)
        return None

    def _failed(self, job: str, talk: _Talk, ref: ControllerRef, why: str) -> float:
        if not talk.failures:
            talk.since = self._runtime.now()
            log.warning(
                "controller did not answer",
                extra={"job": job, "controller": ref.name, "url": ref.url, "reason": why},
            )
        talk.failures, talk.trouble = talk.failures + 1, why
        pause_s = min(_RETRY_S * 2.0 ** min(talk.failures - 1, 16), _RETRY_MAX_S)
        soon_s = soonest_try_s(talk.question, self._runtime.date()) if talk.question else None
        return pause_s if soon_s is None else min(pause_s, soon_s)

    def _answered(
        self, talk: _Talk, request: TaskControlRequest, response: TaskControlResponse
    ) -> None:
        offered = {operation.id: operation for operation in request.request}
        acks: dict[str, str] = {}
        for ack in response.ack:
            name, instead = (ack.operation, ack.instead) if isinstance(ack, Ack) else (ack, "")
            operation = offered.get(name)
            if operation is None or (instead and instead not in operation.instead):
                talk.unknown_acks += 1
            else:
                acks[name] = instead
        broken = frozenset(u.task for u in request.all_unhealthy_tasks if not u.operation)
        by = f"{talk.ref.name} {request.sequence_number}"
        talk.answer = ControllerAnswer(acks, request.down, broken, by)
        talk.answered_at = self._runtime.now()
        talk.failures, talk.trouble = 0, ""


def _request(
    job: str, question: Question, completed: Sequence[JobEvent], number: int, at: float
) -> TaskControlRequest:
    return TaskControlRequest(
        job_handle=job,
        request=list(question.request),
        completed=[
            CompletedOperation(
                id=event.operation,
                task=event.task,
                kind=event.kind.value,
                cause=event.cause.value,
                outcome=event.outcome.value,
                reason=event.reason,
                machine=event.to_machine,
            )
            for event in completed
            if event.task is not None and event.operation  # a crash is not an operation
        ],
        advance_notices=list(question.notices),
        all_unhealthy_tasks=list(question.unhealthy),
        sequence_number=number,
        tasks=question.tasks,
        indexes=list(question.indexes),
        at=at,
    )
