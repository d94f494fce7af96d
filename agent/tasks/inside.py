"""Runs commands for a task: init steps before it, and hooks and probes inside it."""

from __future__ import annotations

import contextlib

from agent.api import Exit
from agent.machine import UnitState
from agent.runtime.core.records import TaskRecord, has_own_init
from agent.runtime.core.slices import cgroup_of
from agent.runtime.units import Units
from agent.tasks.core.exits import OOM_KILL, START_TIMEOUT_S, describe, result_of
from agent.tasks.core.inside import (
    InsideCommand,
    describe_memory_kill,
    inside_properties,
    inside_unit,
    step_properties,
    step_unit,
)
from agent.tasks.core.own_init import unmount_unit
from agent.tasks.unit import UnitOfTask
from wire.errors import StepFailed, SystemdError, TwineError

_GRACE_S = 30.0
"""systemd ends a command at its timeout. After this additional time the host counts as hanging."""
_UNMOUNT_S = 300.0
"""Timeout of the unmount command. It is fast unless the host is very busy."""


class Inside:
    """Units of a task other than its main one."""

    def __init__(self, units: Units, unit_of_task: UnitOfTask) -> None:
        """These units are made from the properties of the task's unit."""
        self._units = units
        self._unit_of_task = unit_of_task

    async def run_init_steps(self, task: TaskRecord, guard: dict[str, object]) -> None:
        """Run the init steps of a task in their order; raises `StepFailed` for the first failure.

        `guard` are unit properties that prevent a start which is no longer allowed.
        """
        unit = step_unit(task.task_id)
        for number, step in enumerate(task.spec.life.init, start=1):
            properties = step_properties(self._unit_of_task(task) | guard, task.task_id, step)
            longest_s = START_TIMEOUT_S + step.timeout_s + _GRACE_S
            end = await self._units.run(unit, properties, timeout_s=longest_s)
            # The end of this unit removes mounts; it must not remove those of the next step.
            await self._units.clear(unit, timeout_s=_GRACE_S)
            if problem := _problem(end, step.timeout_s):
                of = f"{number} of {len(task.spec.life.init)}"
                raise StepFailed(f"init step {step.name} ({of}) failed: {problem}")

    async def stop_init_steps(self, task_id: str) -> None:
        """Stop a running init step; succeeds if there is none."""
        await self._units.clear(step_unit(task_id), timeout_s=_GRACE_S)

    async def remove_leftovers(self, task_id: str) -> None:
        """Remove leftover units of commands inside a task after the task ended.

        They are ordered after the task's unit. While a failed one exists, systemd keeps the task's
        unit loaded and cannot start another unit of that name.
        """
        for left in await self._units.all(inside_unit(task_id, "*")):
            purpose = left.unit.removeprefix(f"twine-in-{task_id}.").removesuffix(".service")
            if "." not in purpose:  # else it belongs to another task with the same prefix
                await self._units.clear(left.unit, timeout_s=_GRACE_S)

    async def unmount_container(self, task: TaskRecord) -> None:
        """Remove the mounts of a task with its own init, if its unit could not.

        Raises `SystemdError`.
        """
        if has_own_init(task.spec):
            unmount = unmount_unit(self._unit_of_task(task), task.task_id)
            await self._units.run(step_unit(task.task_id), unmount, timeout_s=_UNMOUNT_S)

    async def run(self, task: TaskRecord, purpose: str, command: InsideCommand) -> str:
        """Run a command inside a running task; return why it failed, empty if it succeeded."""
        unit = inside_unit(task.task_id, purpose)
        properties = self.properties(task, unit, command)
        try:
            end = await self._units.run(unit, properties, timeout_s=command.timeout_s + _GRACE_S)
        except SystemdError as e:
            return str(e)
        if end.result == OOM_KILL:
            return describe_memory_kill(task.spec.limits.memory_max_bytes)
        return _problem(end, command.timeout_s)

    def properties(self, task: TaskRecord, unit: str, command: InsideCommand) -> dict[str, object]:
        """Return the properties of the unit that runs a command inside a task."""
        cgroup = cgroup_of(task.task_id, task.spec)
        return inside_properties(self._unit_of_task(task), task.task_id, cgroup, unit, command)

    async def before_stop(self, task: TaskRecord) -> str:
        """Run the pre-stop hook of a task, if it has one; return why it failed."""
        hook = task.spec.life.pre_stop
        if hook is None:
            return ""
        command = InsideCommand(tuple(hook.command), hook.timeout_s)
        with contextlib.suppress(TwineError):
            return await self.run(task, "pre-stop", command)
        return "it could not be run"


def _problem(end: UnitState, timeout_s: float) -> str:
    result = result_of(end.result, end.exit_signal)
    if result == "success" and not end.exit_code:
        return ""
    if result == "timeout":
        return f"it did not end within {timeout_s:g} s"
    return describe(
        Exit(result=result, code=end.exit_code, signal=end.exit_signal, at=end.exited_at or 0)
    )
