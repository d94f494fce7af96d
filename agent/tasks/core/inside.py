"""Units of a task other than its main one: init steps before it, and commands inside it.

Both are derived from the task's own unit. They have the same root, user, sandbox, limits and slice,
and no right that the task lacks. A command inside a task also joins its network and IPC,
and ends with it. It has a memory limit of its own: if it exceeds that limit, only the command ends
(docs/adr/0041, 0178).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.api import Step
from agent.resources.core.huge_pages import no_pages_steps
from agent.runtime.core.records import unit_of
from agent.tasks.core.own_init import container_command_properties, is_container_unit, step_command
from wire.units import size_text

_S = 1_000_000

_COMMAND_MIN_BYTES = 16 << 20
"""Minimum memory limit of a command: enough for a shell and the programs that it starts."""
_OOM_SCORE = 500
"""If the memory of all tasks together is short, the kernel kills commands first (proc(5))."""
_TASK_ONLY_MEMORY = ("MemoryMin", "MemoryLow", "MemoryHigh", "ManagedOOMPreference")
"""Memory protection that the task has and its commands do not have."""
_TASK_ONLY_STEPS = ("ExecCondition", "ExecStartPre", "ExecStopPost")
"""Steps before and after the task's main process; a command must not repeat them."""


@dataclass(frozen=True, slots=True)
class InsideCommand:
    """A command to run inside a running task."""

    argv: tuple[str, ...]
    timeout_s: float
    terminal: str = ""
    """Path of the command's pseudo terminal; empty: none."""
    pipes: tuple[str, str, str] | None = None
    """Paths of its standard input, output and error, if it has no terminal."""
    environment: tuple[str, ...] = ()
    quiet: bool = False
    """Whether its output is dropped; else it goes to the pipes, or to the task's log."""


def command_memory_bytes(task_bytes: int) -> int:
    """Return how much memory each command inside a task may use: half as much as the task."""
    return max(task_bytes // 2, _COMMAND_MIN_BYTES)


def describe_memory_kill(task_bytes: int) -> str:
    """Return why the kernel killed a command inside a task whose memory limit is `task_bytes`."""
    most = size_text(command_memory_bytes(task_bytes))
    return (
        f"it exceeded {most} of memory, the limit of a command inside this task; the "
        "task continues to run"
    )


def step_unit(task_id: str) -> str:
    """Return the name of the unit of a task's init steps, which run one after the other."""
    return f"twine-step-{task_id}.service"


def inside_unit(task_id: str, purpose: str) -> str:
    """Return the name of the unit of a command inside a task."""
    return f"twine-in-{task_id}.{purpose}.service"


def step_properties(task_unit: Mapping[str, object], task_id: str, step: Step) -> dict[str, object]:
    """Return the properties of an init step's unit, made from those of the task's unit."""
    return {
        **task_unit,
        "Description": f"Twine task {task_id}: init step {step.name}",
        "ExecStart": [
            step_command(task_unit, step.command)
            if is_container_unit(task_unit)
            else list(step.command)
        ],
        "RuntimeMaxUSec": round(step.timeout_s * _S),
    }


def inside_properties(
    task_unit: Mapping[str, object], task_id: str, cgroup: str, unit: str, command: InsideCommand
) -> dict[str, object]:
    """Return the properties of the unit of a command inside a task with the given cgroup."""
    task = unit_of(task_id)
    if is_container_unit(task_unit):
        properties = container_command_properties(
            task_unit, cgroup, unit, command.argv, command.environment
        )
    else:
        properties = {**_in_sandbox(task_unit, command), "JoinsNamespaceOf": [task]}
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


def _in_sandbox(task_unit: Mapping[str, object], command: InsideCommand) -> dict[str, object]:
    """Return the properties of a unit that runs a command in the sandbox of a task."""
    environment = task_unit.get("Environment", ())
    most = task_unit.get("MemoryMax", 0)
    assert isinstance(environment, list | tuple)
    assert isinstance(most, int)
    properties = {
        **task_unit,
        "ExecStart": [list(command.argv)],
        "RootDirectoryStartOnly": True,
        "Environment": _without_duplicates([*environment, *command.environment]),
        "MemoryMax": command_memory_bytes(most),
        "OOMPolicy": "kill",
        "OOMScoreAdjust": _OOM_SCORE,
    }
    for name in (*_TASK_ONLY_STEPS, *_TASK_ONLY_MEMORY):
        properties.pop(name, None)
    if bound := no_pages_steps(task_unit.get("ExecStartPre", ())):
        properties["ExecStartPre"] = bound
    return properties


def _without_duplicates(assignments: Sequence[str]) -> list[str]:
    """Return the last assignment of each variable: systemd refuses a second one."""
    return list({pair.partition("=")[0]: pair for pair in assignments}.values())


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
