"""Interface for host resources that a task gets before it starts and releases afterwards."""

from __future__ import annotations

from agent.runtime.core.records import TaskRecord


class TaskStage:
    """One kind of host resource that tasks need. The methods of this base class do nothing.

    A task's loop calls all stages in their order (`HostParts.stages`, agent/composition.py). Every
    method is idempotent: a step that failed or was interrupted is repeated from its beginning. A
    method raises `HostError` if the host cannot do the step now; the task's loop tries again.
    """

    def check(self, task: TaskRecord) -> None:
        """Raise if the task cannot start now; called before anything is prepared for a start."""

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Prepare what the task needs before its unit starts.

        Returns the record with what the host chose for the task, such as addresses.
        """
        return task

    def properties(
        self,
        task: TaskRecord,  # noqa: ARG002
        unit: dict[str, object],
    ) -> dict[str, object]:
        """Return the properties of the task's unit, with those that this stage adds to `unit`."""
        return unit

    async def resize(self, task: TaskRecord) -> TaskRecord:
        """Adapt a running task to its changed specification; return the record as `ensure` does."""
        return task

    def changed(self, task: TaskRecord) -> None:
        """Called after the state of a task has changed."""

    async def ended(self, task_id: str) -> None:
        """Release what only a task with processes needs; called when its unit is gone."""

    async def release(self, task_id: str) -> None:
        """Release everything of a removed task; succeeds if there is nothing."""
