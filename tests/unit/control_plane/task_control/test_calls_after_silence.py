"""When a controller that did not answer is called again."""

import pytest

from control_plane.task_control.core.conversation import Question, retry_before_deadline_s
from taskcontrol.api import AdvanceNotice, TaskOperation


def a_notice(deadline: float | None) -> AdvanceNotice:
    return AdvanceNotice(
        id="n", kind="maintenance", machine="m1", tasks=[1], start=0.0, deadline=deadline
    )


def an_operation(deadline: float | None) -> TaskOperation:
    return TaskOperation(id="t1", task=1, kind="move", cause="failure", deadline=deadline)


@pytest.mark.behaviour("F-55", "TC10")
def test_the_nearer_a_deadline_the_sooner_the_next_try() -> None:
    """The delay is a quarter of the time to the next deadline, of any kind."""
    question = Question(
        request=(an_operation(160.0), an_operation(None)),
        notices=(a_notice(140.0), a_notice(99.0), a_notice(None)),
    )
    assert retry_before_deadline_s(question, 100.0) == 10.0
    assert retry_before_deadline_s(question, 139.0) == 1.0
    assert retry_before_deadline_s(question, 140.0) == 5.0
    assert retry_before_deadline_s(question, 160.0) is None
    assert retry_before_deadline_s(Question(), 100.0) is None
