"""Calls the TaskControllers of all jobs, one call at a time per job.

The scheduler sets the questions and evaluates the answers; this module decides only when to call.
All state is in memory: after a restart the controllers are called again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from control_plane.api.jobs import ControllerRef
from control_plane.api.operations import JobEvent
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.workers import Pace, Workers
from control_plane.task_control.core.conversation import (
    ControllerAnswer,
    Question,
    retry_before_deadline_s,
)
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
NUMBERS_BLOCK = 1000
"""Numbers of calls that are reserved at once: one write for this many calls."""
REPEAT_S = 10.0
"""A waiting request is repeated after this time, even if nothing changed."""
_GAP_S = 0.2
"""Changes of a question within this time are sent in one call."""
_RETRY_S, _RETRY_MAX_S = 1.0, 60.0
"""First and longest pause between two calls that fail."""
_REPORTED_MAX = 1000
"""Ended operations of one call; older ones are in the job's log."""
_AT_ONCE = 32
"""Calls of all jobs that run at once."""


async def no_controller(ref: ControllerRef, _: TaskControlRequest) -> TaskControlResponse:
    """Raise `Unreachable`: for control planes that cannot call controllers."""
    raise Unreachable(f"this control plane cannot call controllers such as {ref.name}")


@dataclass(slots=True)
class _Conversation:
    """The conversation with the controller of one job."""

    ref: ControllerRef
    question: Question | None = None
    """The present question; None: the scheduler has set none since the last answer."""
    answered_question: Question = field(default_factory=Question)
    """The last question that was answered."""
    completed: list[JobEvent] = field(default_factory=list)
    """Ended operations that were not reported yet."""
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
    """The conversations with all controllers; `run` makes the calls."""

    def __init__(self, runtime: Runtime, call: CallController) -> None:
        self._runtime, self._call = runtime, call
        self._conversations: dict[str, _Conversation] = {}
        self._listeners: list[Callable[[str], None]] = []
        pace = Pace(limit=_AT_ONCE, gather_s=_GAP_S)
        self._workers = Workers(runtime, "task control", self._call_if_due, pace)

    def listen(self, answered: Callable[[str], None]) -> None:
        """Call `answered(job)` after each answer."""
        self._listeners.append(answered)

    async def run(self) -> None:
        """Make calls until cancelled."""
        await self._workers.run()

    # -- for the scheduler

    def answer(self, job: str) -> ControllerAnswer:
        """Return the last answer of a job's controller."""
        conversation = self._conversations.get(job)
        return conversation.answer if conversation is not None else ControllerAnswer()

    def has_begun(self, job: str) -> bool:
        """Return whether a conversation with the job's controller has begun."""
        return job in self._conversations

    def begin(
        self, job: str, ref: ControllerRef, reported: int, missed: Sequence[JobEvent]
    ) -> None:
        """Begin a conversation; `missed` are the events after the last `reported` one."""
        self._conversations[job] = _Conversation(
            ref,
            reported=reported,
            completed=list(missed)[-_REPORTED_MAX:],
            began=self._runtime.now(),
        )

    def age_s(self, job: str) -> float:
        """Return the age of a conversation in seconds."""
        return self._runtime.now() - self._conversations[job].began

    def needs_numbers(self, job: str) -> bool:
        """Return whether numbers must be reserved before the next call."""
        conversation = self._conversations.get(job)
        return conversation is not None and conversation.next >= conversation.end

    def reserve_numbers(self, job: str, first: int, end: int) -> None:
        """Reserve the numbers from `first` on, below `end`, for calls of a job."""
        conversation = self._conversations[job]
        conversation.next, conversation.end = first, end

    def last_reported(self, job: str) -> int:
        """Return the number of the last event that was reported to the controller."""
        conversation = self._conversations.get(job)
        return conversation.reported if conversation is not None else 0

    def add_ended(self, job: str, events: Sequence[JobEvent]) -> None:
        """Record ended operations, to report them in the next call."""
        conversation = self._conversations.get(job)
        if conversation is not None and events:
            conversation.completed = [*conversation.completed, *events][-_REPORTED_MAX:]

    def set_question(self, job: str, ref: ControllerRef, question: Question) -> None:
        """Set the question to a controller, which is called if it is new or if a request waits."""
        conversation = self._conversations[job]
        if conversation.ref != ref:  # answers of the former controller do not count
            conversation.ref, conversation.answer, conversation.answered_question = (
                ref,
                ControllerAnswer(),
                Question(),
            )
            conversation.failures, conversation.trouble = 0, ""
        conversation.question = question
        if conversation.failures:  # the next try is scheduled; a nearer deadline makes it earlier
            soon_s = retry_before_deadline_s(question, self._runtime.date())
            if soon_s is not None:
                self._workers.wake_at(job, self._runtime.now() + soon_s)
            return
        due_s = self._due_s(conversation)
        if due_s == 0.0:
            self._workers.wake(job)
        elif due_s is not None:
            self._workers.wake_at(job, self._runtime.now() + due_s)

    def forget(self, job: str) -> None:
        """End a conversation."""
        self._conversations.pop(job, None)
        self._workers.forget(job)

    def describe(self, job: str) -> str:
        """Describe the state of the conversation; empty: there is none."""
        conversation = self._conversations.get(job)
        if conversation is None:
            return ""
        controller = f"controller {conversation.ref.name} at {conversation.ref.url}"
        if conversation.failures:
            since_s = self._runtime.now() - conversation.since
            calls = f"{conversation.failures} call{'s' if conversation.failures > 1 else ''}"
            return f"{controller} did not answer {calls} in {since_s:.0f} s: {conversation.trouble}"
        if not conversation.answer.by:
            return f"{controller} has not been called yet"
        ago_s = self._runtime.now() - conversation.answered_at
        unknown = (
            f"; {conversation.unknown_acks} acknowledgements were for unknown operations"
            if conversation.unknown_acks
            else ""
        )
        return (
            f"{controller} answered {ago_s:.0f} s ago: {len(conversation.answer.acks)} of"
            f" {len(conversation.answered_question.request)} acknowledged{unknown}"
        )

    # -- calls

    def _due_s(self, conversation: _Conversation) -> float | None:
        """Return the seconds until the next call; None: none is needed."""
        if conversation.question is None or conversation.next >= conversation.end:
            return None
        if conversation.failures:
            return 0.0
        if conversation.question != conversation.answered_question or conversation.completed:
            return 0.0
        if conversation.question.request:
            return max(0.0, conversation.answered_at + REPEAT_S - self._runtime.now())
        return None

    async def _call_if_due(self, job: str) -> float | None:
        """Call the controller if a call is due; return the seconds until the next check."""
        conversation = self._conversations.get(job)
        due_s = self._due_s(conversation) if conversation is not None else None
        if conversation is None or due_s is None or due_s > 0:
            return due_s
        question, completed = conversation.question, list(conversation.completed)
        ref, number = conversation.ref, conversation.next
        assert question is not None
        conversation.next += 1
        request = _request(job, question, completed, number, self._runtime.date())
        try:
            response = await self._call(ref, request)
        except TwineError as e:
            return self._record_failure(job, conversation, ref, str(e))
        if self._conversations.get(job) is not conversation or conversation.ref != ref:
            return 0.0
        self._record_answer(conversation, request, response)
        conversation.answered_question, conversation.question = question, None
        if completed:  # the list may have grown during the call, and lost its oldest events
            conversation.reported = completed[-1].seq
            conversation.completed = [
                event for event in conversation.completed if event.seq > conversation.reported
            ]
        for answered in self._listeners:
            answered(job)
        return None

    def _record_failure(
        self, job: str, conversation: _Conversation, ref: ControllerRef, why: str
    ) -> float:
        if not conversation.failures:
            conversation.since = self._runtime.now()
            log.warning(
                "controller did not answer",
                extra={"job": job, "controller": ref.name, "url": ref.url, "reason": why},
            )
        conversation.failures, conversation.trouble = conversation.failures + 1, why
        pause_s = min(_RETRY_S * 2.0 ** min(conversation.failures - 1, 16), _RETRY_MAX_S)
        if conversation.question is None:
            return pause_s
        soon_s = retry_before_deadline_s(conversation.question, self._runtime.date())
        return pause_s if soon_s is None else min(pause_s, soon_s)

    def _record_answer(
        self,
        conversation: _Conversation,
        request: TaskControlRequest,
        response: TaskControlResponse,
    ) -> None:
        offered = {operation.id: operation for operation in request.request}
        acks: dict[str, str] = {}
        for ack in response.ack:
            name, instead = (ack.operation, ack.instead) if isinstance(ack, Ack) else (ack, "")
            operation = offered.get(name)
            if operation is None or (instead and instead not in operation.instead):
                conversation.unknown_acks += 1
            else:
                acks[name] = instead
        broken = frozenset(u.task for u in request.all_unhealthy_tasks if not u.operation)
        by = f"{conversation.ref.name} {request.sequence_number}"
        conversation.answer = ControllerAnswer(acks, request.down, broken, by)
        conversation.answered_at = self._runtime.now()
        conversation.failures, conversation.trouble = 0, ""


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
