"""What a task gets from its host before it starts, and gives back afterwards."""

from __future__ import annotations

from agent.runtime.core.records import TaskRecord


class TaskStage:
    """One thing of the host that tasks need. This base class gives nothing.

    A task's loop goes through all stages in their order (tasks/stages.py). Every method is
    idempotent: a step that failed, or that an agent died in, is taken again from its beginning.
    Methods raise `HostError` where the host cannot do it now; the task's loop tries again.
    """

    def check(self, task: TaskRecord) -> None:
        """Raise where the task cannot start now; called before anything is made for a start."""

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Make what the task needs before its unit starts.

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
        """Bring what a running task has to its specification, and return it as `ensure` does."""
        return task

    def changed(self, task: TaskRecord) -> None:
        """Called after the state of a task has changed."""

    async def ended(self, task_id: str) -> None:
        """Give back what only a task with processes needs; called when its unit is gone."""

    async def release(self, task_id: str) -> None:
        """Give back everything of a task that is removed; nothing there is no error."""
