"""Rows of the route table about single tasks."""

from __future__ import annotations

from control_plane.api.operations import RestartRequest, TaskStory
from control_plane.api.people import Needs
from control_plane.api.route_rows import owner_row, viewer_row
from control_plane.api.tasks import HostDescription, TaskDescription
from wire.routes import Route

_TASK = "/v1/jobs/{job}/tasks/{index}"

TASK_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "describe_task",
        _TASK,
        TaskDescription,
        "State and usage of a task, read from its agent now",
    ),
    viewer_row(
        "describe_host",
        "/v1/machines/{machine}/host",
        HostDescription,
        "Settings of a machine with proof, and usage of its tasks, read from its agent now",
    ),
    owner_row(
        "restart_task",
        f"POST {_TASK}/restart",
        TaskStory,
        "Stop a task and start it again where it is, within the budget; or at once",
        request=RestartRequest,
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
