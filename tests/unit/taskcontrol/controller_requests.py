"""Requests to controllers. Every argument has a default: pass only what the test is about."""

from typing import Any

from taskcontrol.api import (
    Ack,
    TaskControlRequest,
    TaskControlResponse,
    TaskOperation,
    UnhealthyTask,
)

MONDAY = 1_767_571_200.0
"""2026-01-05 00:00 UTC."""


def an_update(task: int, **fields: Any) -> TaskOperation:
    """Return the update of a task because of a release."""
    known = {"id": f"t{task}", "task": task, "kind": "update", "cause": "release"}
    return TaskOperation(**known | fields)


def a_request(tasks: int, *operations: TaskOperation, **fields: Any) -> TaskControlRequest:
    """Return a request about a job of `tasks` tasks. The tasks in `down` do not serve."""
    down = [UnhealthyTask(task=task) for task in fields.pop("down", ())]
    known = {"job_handle": "db", "sequence_number": 1, "tasks": tasks, "at": MONDAY}
    return TaskControlRequest(request=list(operations), all_unhealthy_tasks=down, **known | fields)


def acked(response: TaskControlResponse) -> list[str]:
    """Return the acknowledged operations, each as `id` or `id as way`."""
    return [
        f"{ack.operation} as {ack.instead}" if isinstance(ack, Ack) else ack for ack in response.ack
    ]
