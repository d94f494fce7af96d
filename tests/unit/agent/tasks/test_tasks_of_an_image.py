"""The tasks that use an image; other threads query them while tasks are created and removed."""

from __future__ import annotations

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
    assert tasks.using(IMAGE) == ["web-0", "web-1", "web-2"]
