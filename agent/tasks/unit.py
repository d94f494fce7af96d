"""Builds the properties of a task's unit, and reads the unit's state."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from agent.images.core.image_run import as_run, image_properties
from agent.images.core.image_user import login
from agent.images.core.writable_root import in_run, writable_root_properties
from agent.images.roots import TaskRoots
from agent.machine import UnitState
from agent.resources.core.exclusive_cpus import exclusive_cpu_properties
from agent.runtime.core.records import TaskRecord, has_own_init
from agent.runtime.stage import TaskStage
from agent.tasks.core.exits import result_of
from agent.tasks.core.lifecycle import ObservedUnit
from agent.tasks.core.own_init import container_unit
from agent.tasks.core.unit_properties import describe_unit, key_in, unit_properties
from agent.volumes.core.mounts import mount_properties


def observed_unit(unit: UnitState) -> ObservedUnit:
    """Return the part of a unit's state that a decision needs."""
    return ObservedUnit(
        active=unit.active,
        sub=unit.sub,
        result=result_of(unit.result, unit.exit_signal),
        invocation_id=unit.invocation_id,
        key=key_in(unit.description),
        exit_code=unit.exit_code,
        exit_signal=unit.exit_signal,
        exited_at=unit.exited_at,
        started_at=unit.started_at,
    )


class SystemContainer(TaskStage):
    """Replaces the unit of a task with its own init by a unit that starts a container."""

    def __init__(self, state_dir: str, run_dir: str) -> None:
        """`state_dir` has the volumes; mounts of containers are below `run_dir`."""
        self._folders = state_dir, run_dir

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit that starts the container; `unit` itself for all other tasks."""
        if not has_own_init(task.spec):
            return unit
        assert task.ids is not None, "assigned when the task was admitted"
        return container_unit(task.task_id, task.spec, unit, task.ids, *self._folders)


class UnitOfTask:
    """Builds the unit of a task: its basic properties, then those of each stage in turn."""

    def __init__(self, roots: TaskRoots, stages: Sequence[TaskStage]) -> None:
        """`roots` has the images' configurations; `stages` add properties."""
        self._roots = roots
        self.stages = stages
        """The stages, in the order in which they run before a start."""

    def __call__(self, task: TaskRecord) -> dict[str, object]:
        """Return all properties of a task's unit."""
        unit = task_unit(self._roots, task)
        for stage in self.stages:
            unit = stage.properties(task, unit)
        return unit


def task_unit(roots: TaskRoots, task: TaskRecord) -> dict[str, object]:
    """Return the properties of a task's unit that no stage adds."""
    config, root = roots.config(task.spec.image), str(roots.path(task.task_id))
    user = None if config is None or has_own_init(task.spec) else config.runs_as
    writes = roots.is_writable(task.spec)
    if writes and user is None:
        user = roots.owner(task.spec.image)
    run = in_run(roots.writable_folders(task.spec.image)) if writes else None
    spec = as_run(task.spec, config)
    spec = replace(spec, environment={**login(user), **spec.environment})
    unit = {
        **unit_properties(task.task_id, spec, root),
        **image_properties(spec, config),
        **mount_properties(task.task_id, spec, str(roots.state), root, user, run),
        **exclusive_cpu_properties(task.own_cpus),
        "Description": describe_unit(task.task_id, task.spec),
    }
    if not writes:
        return unit
    folders = roots.writable_folders(task.spec.image)
    return unit | writable_root_properties(unit, spec, folders)
