"""What is run for a task beside its main process: steps before it, and commands inside it.

Both are units of their own, made from the task's own unit: same root, user, sandbox, limits
and slice, so there is no right that the task itself has not. A command inside also joins
the task's network and IPC and is moved into its cgroup, so that the two together stay within the
task's limits and end together (docs/adr/0041).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.api import Step
from agent.resources.core.huge_pages import bounded_inside
from agent.runtime.core.records import unit_of
from agent.tasks.core.own_init import entered, is_enclosed, step_command

_S = 1_000_000

_MOVE = (
    'exec 2>/dev/null; to=/sys/fs/cgroup$1/cgroup.procs; [ -e "$to" ] || exit 1; '
    'from=$(dirname "/sys/fs/cgroup$1")/$2/cgroup.procs; '
    'for round in 1 2 3; do for pid in $(cat "$from"); do '
    '[ "$pid" = $$ ] || echo "$pid" >"$to" || true; done; done'
)
"""Moves what runs in one cgroup to another; again, since what is moved may fork meanwhile."""


_TASKS_OWN = ("ExecCondition", "ExecStartPre", "ExecStopPost")
"""What a running task has behind it, or still before it."""


@dataclass(frozen=True, slots=True)
class InsideCommand:
    """A command to be run inside a running task."""

    argv: tuple[str, ...]
    timeout_s: float
    terminal: str = ""
    """Path of a pseudo terminal that it gets as its own."""
    pipes: tuple[str, str, str] | None = None
    """Paths of its standard input, output and error, where there is no terminal."""
    environment: tuple[str, ...] = ()
    quiet: bool = False
    """What it writes is dropped; else it is in the task's log, unless it has pipes."""


def step_unit(task_id: str) -> str:
    """Return the name of the unit of a task's init steps, which run one after the other."""
    return f"twine-step-{task_id}.service"


def inside_unit(task_id: str, purpose: str) -> str:
    """Return the name of the unit of a command inside a task."""
    return f"twine-in-{task_id}.{purpose}.service"


def step_properties(whole: Mapping[str, object], task_id: str, step: Step) -> dict[str, object]:
    """Return the unit of an init step, from all properties of the task's unit."""
    return {
        **whole,
        "Description": f"Twine task {task_id}: init step {step.name}",
        "ExecStart": [
            step_command(whole, step.command) if is_enclosed(whole) else list(step.command)
        ],
        "RuntimeMaxUSec": round(step.timeout_s * _S),
    }


def inside_properties(
    whole: Mapping[str, object], task_id: str, cgroup: str, unit: str, command: InsideCommand
) -> dict[str, object]:
    """Return the unit of a command inside a task, whose processes are in `cgroup`."""
    task = unit_of(task_id)
    if is_enclosed(whole):
        properties = entered(whole, cgroup, unit, command.argv, command.environment)
    else:
        properties = {**_beside(whole, cgroup, unit, command), "JoinsNamespaceOf": [task]}
    return {
        **properties,
        "Description": f"Twine task {task_id}: inside",
        "RuntimeMaxUSec": round(command.timeout_s * _S),
        "TimeoutStopUSec": 2 * _S,
        "Requisite": [task],
        "PartOf": [task],
        "After": [task],
        "CollectMode": "inactive",
        **_streams(command),
    }


def _beside(
    whole: Mapping[str, object], cgroup: str, unit: str, command: InsideCommand
) -> dict[str, object]:
    """Return what makes a unit run a command with the sandbox of a task, and moves it there."""
    environment = whole.get("Environment", ())
    assert isinstance(environment, list | tuple)
    properties = {
        **whole,
        "ExecStart": [list(command.argv)],
        "ExecStartPost": [["/bin/sh", "-c", _MOVE, "sh", cgroup, unit]],
        "RootDirectoryStartOnly": True,
        "Environment": [*environment, *command.environment],
    }
    for name in _TASKS_OWN:
        properties.pop(name, None)
    if bound := bounded_inside(whole.get("ExecStartPre", ())):
        properties["ExecStartPre"] = bound
    return properties


def _streams(command: InsideCommand) -> dict[str, object]:
    if command.terminal:
        return {
            "TTYPath": command.terminal,
            **dict.fromkeys(("StandardInput", "StandardOutput", "StandardError"), "tty"),
        }
    if command.pipes is not None:
        names = ("Input", "Output", "Error")
        return {f"Standard{n}File": path for n, path in zip(names, command.pipes, strict=True)}
    return {"StandardOutput": "null", "StandardError": "null"} if command.quiet else {}
