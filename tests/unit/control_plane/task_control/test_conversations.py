"""Conversations with controllers on virtual time: when each is called, and what is reported about
it."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from virtual_time import RUNTIME, run

from control_plane.api.jobs import ControllerRef
from control_plane.api.operations import Cause, JobEvent, OperationKind, OperationState
from control_plane.task_control.controllers import REPEAT_S, Controllers
from control_plane.task_control.core.conversation import Question
from taskcontrol.api import TaskControlRequest, TaskControlResponse, TaskOperation
from wire.errors import Unreachable

REF = ControllerRef(url="https://10.0.0.9:7450", name="db")


def a_question(deadline: float | None = None) -> Question:
    return Question((TaskOperation(id="t1", task=1, kind="move", cause="x", deadline=deadline),))


def talking(
    body: Callable[[Controllers, list[float]], Awaitable[None]], *, answers: bool = True
) -> None:
    """Run a body that talks for job `web`. It gets the times of calls, in seconds since the
    start."""

    async def main() -> None:
        await asyncio.sleep(5)  # the process started before the conversation
        calls, began = list[float](), RUNTIME.now()

        async def call(_: ControllerRef, __: TaskControlRequest) -> TaskControlResponse:
            calls.append(round(RUNTIME.now() - began, 3))
            if not answers:
                raise Unreachable("no connection")
            return TaskControlResponse()

        controllers = Controllers(RUNTIME, call)
        controllers.begin("web", REF, 0, ())
        controllers.reserve_numbers("web", 1, 1000)
        running = asyncio.create_task(controllers.run())
        await body(controllers, calls)
        running.cancel()

    run(main())


def test_a_controller_that_does_not_answer_is_called_after_1_2_4_seconds_and_at_last_each_minute():
    async def body(controllers: Controllers, calls: list[float]) -> None:
        controllers.set_question("web", REF, a_question())
        await asyncio.sleep(200)
        pauses = [after - before for before, after in itertools.pairwise(calls)]
        assert [round(pause) for pause in pauses[:8]] == [1, 2, 4, 8, 16, 32, 60, 60]
        assert controllers.describe("web").endswith(" in 200 s: no connection")

    talking(body, answers=False)


@pytest.mark.behaviour("F-55", "TC10")
def test_a_nearer_deadline_makes_the_next_call_of_a_silent_controller_earlier():
    """The next call moves to a quarter of the remaining time, but not to the present moment."""

    async def body(controllers: Controllers, calls: list[float]) -> None:
        controllers.set_question("web", REF, a_question())
        await asyncio.sleep(70)
        before = list(calls)
        called_at = 70.0
        controllers.set_question("web", REF, a_question(deadline=RUNTIME.date() + 40.0))
        await asyncio.sleep(15)
        assert [round(at - called_at) for at in calls[len(before) :]][:1] == [10]

    talking(body, answers=False)


def test_a_waiting_request_is_repeated_after_its_delay():
    async def body(controllers: Controllers, calls: list[float]) -> None:
        controllers.set_question("web", REF, a_question())
        await asyncio.sleep(1)
        assert len(calls) == 1
        for _ in range(4):
            controllers.set_question("web", REF, a_question())
            await asyncio.sleep(2)
        assert len(calls) == 1
        controllers.set_question("web", REF, a_question())
        await asyncio.sleep(3)
        assert [round(at - calls[0]) for at in calls] == [0, REPEAT_S]

    talking(body)


def an_end(seq: int) -> JobEvent:
    return JobEvent(
        seq=seq,
        task=seq,
        operation=f"t{seq}",
        kind=OperationKind.UPDATE,
        cause=Cause.RELEASE,
        outcome=OperationState.DONE,
    )


@pytest.mark.behaviour("BUG-CP141")
def test_operations_that_end_during_a_call_with_many_others_are_reported_in_the_next():
    """Formerly a call removed as many events as it had reported, although the oldest of them had
    made room for newer ones."""
    reported = list[list[str]]()

    async def main() -> None:
        async def call(_: ControllerRef, request: TaskControlRequest) -> TaskControlResponse:
            reported.append([operation.id for operation in request.completed])
            if len(reported) == 1:
                controllers.add_ended("web", [an_end(1001), an_end(1002)])
            return TaskControlResponse()

        controllers = Controllers(RUNTIME, call)
        controllers.begin("web", REF, 0, [an_end(seq) for seq in range(1, 1001)])
        controllers.reserve_numbers("web", 1, 1000)
        running = asyncio.create_task(controllers.run())
        for _ in range(2):
            controllers.set_question("web", REF, a_question())
            await asyncio.sleep(5)
        running.cancel()

    run(main())
    assert [len(operations) for operations in reported] == [1000, 2]
    assert reported[1] == ["t1001", "t1002"]


def test_a_conversation_reports_its_age():
    async def body(controllers: Controllers, _: list[float]) -> None:
        await asyncio.sleep(30)
        assert controllers.age_s("web") == 30.0

    talking(body)
