"""Rows of the route table about single tasks."""

from __future__ import annotations

from control_plane.api.operations import RestartRequest, TaskStory
from control_plane.api.people import Needs
from control_plane.api.tasks import HostDescription, TaskDescription
from wire.routes import Route

_TASK = "/v1/jobs/{job}/tasks/{index}"

TASK_ROUTES: tuple[Route, ...] = (
    Route(
        "describe_task",
        "GET",
        _TASK,
        response=TaskDescription,
        needs=Needs.VIEWER,
        summary="State and usage of a task, read from its agent now",
    ),
    Route(
        "describe_host",
        "GET",
        "/v1/machines/{machine}/host",
        response=HostDescription,
        needs=Needs.VIEWER,
        summary=(
            "Settings of a machine with proof, and usage of its tasks, read from its agent now"
        ),
    ),
    Route(
        "restart_task",
        "POST",
        f"{_TASK}/restart",
        request=RestartRequest,
        response=TaskStory,
        needs=Needs.OWNER,
        summary="Stop a task and start it again where it is, within the budget; or at once",
    ),
    Route(
        "exec_task",
        "GET",
        f"{_TASK}/exec",
        query=("command", "tty", "rows", "columns", "term"),
        duplex=True,
        needs=Needs.OWNER,
        summary="Run a command inside a running task, over a websocket",
    ),
)
