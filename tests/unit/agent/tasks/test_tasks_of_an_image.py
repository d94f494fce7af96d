"""The tasks that use an image; other threads query them while tasks are created and removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import IMAGE, a_record, a_spec

from agent.runtime.core.records import TaskRecord
from agent.tasks.queries import TaskQueries
from agent.tasks.supervisor import TaskLoop


class _Loop(TaskLoop):
    """A loop with a record; a task is created whenever the record is read."""

    def __init__(self, tasks: _Crowded) -> None:
        self._tasks = tasks

    @property  # type: ignore[override]
    def record(self) -> TaskRecord:
        self._tasks.create()
        return a_record()


class _Crowded(TaskQueries):
    """Tasks that are created between any two steps of a thread that reads them."""

    def create(self) -> None:
        number = len(self._loops)
        self._loops[f"web-{number}"] = _Loop(self)
        self._being_created[f"web-{number + 1}"] = a_spec()


@pytest.mark.behaviour("BUG-AG45")
def test_the_tasks_of_an_image_are_found_while_other_tasks_come() -> None:
    """The search for unused images failed in its thread, and was never repeated."""
    tasks = _Crowded()
    tasks.create()
    tasks.create()
    assert tasks.tasks_using(IMAGE) == ["web-0", "web-1", "web-2"]


class _Loops(dict[str, TaskLoop]):
    """The loops of tasks; whenever they were copied, the creation of a task ends."""

    def __init__(self, tasks: TaskQueries) -> None:
        super().__init__()
        self._tasks = tasks

    def items(self) -> Any:
        found = dict(super().items()).items()
        self._tasks._being_created.clear()
        return found

    def copy(self) -> dict[str, TaskLoop]:
        return dict(self.items())


@pytest.mark.behaviour("BUG-AG100")
@pytest.mark.parametrize(
    "find", [TaskQueries.specs, lambda tasks: tasks.tasks_using(IMAGE)], ids=["specs", "using"]
)
def test_a_task_whose_creation_ends_meanwhile_is_found(find: Callable[[TaskQueries], Any]) -> None:
    """A thread that removed a volume missed a task that was created at that moment."""
    tasks = TaskQueries()
    tasks._being_created = {"web": a_spec()}
    tasks._loops = _Loops(tasks)
    assert list(find(tasks)) == ["web"]
