"""How a task's unit contains faults of the task itself, and what no job file can request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders import IMAGE, a_spec

from agent.api import Limits, TaskSpec
from agent.tasks.core.unit_properties import unit_properties
from control_plane.api.validate import job_errors
from wire.errors import InvalidInput
from wire.routes import decode_json

UNIT = unit_properties("web", a_spec(limits=Limits(tasks_max=9)), "/r")


@pytest.mark.behaviour("F-11", "F-13", "F-25", "F-28")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TasksMax", 9),  # a fork bomb ends at its own limit
        ("OOMPolicy", "kill"),  # a child that is killed for memory ends the task with this result
        ("LogRateLimitBurst", 10_000),  # a flood of lines is cut off for each unit
        ("NotifyAccess", "none"),  # notifications of a task reach no component
    ],
)
def test_a_unit_bounds_what_its_task_can_do_to_others(name: str, value: object) -> None:
    assert UNIT[name] == value


@pytest.mark.behaviour("F-22")
def test_no_task_has_a_watchdog_of_systemd() -> None:
    """systemd would kill a unit that an operator freezes."""
    assert not {name for name in UNIT if name.startswith("Watchdog")}


@pytest.mark.behaviour("F-83")
@pytest.mark.parametrize(
    "fields",
    [
        {"privileged": True},
        {"mounts": [{"source": "/", "target": "/host"}]},
        {"devices": ["/dev/mem"]},
        {"capabilities": ["CAP_SYS_ADMIN"]},
        {"user": "root"},
        {"network": {"mode": "none-of-ours"}},
        {"volumes": {"../up": {}}},
    ],
)
def test_no_specification_asks_for_more_of_its_host(fields: dict[str, Any]) -> None:
    """No field exists for it, neither at the front end nor at the agent."""
    job = {"name": "web", "entitlement": "e", "tasks": 1, "image": IMAGE, "command": ["/x"]}
    assert job_errors(job) == []
    assert job_errors(job | fields) != []
    with pytest.raises(InvalidInput):
        decode_json(msgspec.json.encode({"image": IMAGE} | fields), TaskSpec, "the task")
