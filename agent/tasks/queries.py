"""Queries about the tasks of this machine, which change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agent.api import Health, TaskSpec, TaskState, TaskStatus
from agent.api.ranges import ID_MAX, bounded
from agent.network.core.network import gate_for
from agent.runtime.core.records import OVER, TaskRecord, Wanted, status_of, unit_of
from agent.tasks.core.admission import is_over
from agent.tasks.core.reconcile import KnownTask
from agent.tasks.supervisor import TaskLoop
from agent.volumes.core.volumes import KINDS_OF_A_TASK, paths_of
from wire.errors import Conflict, NotFound


class TaskQueries:
    """The known tasks of this machine; `HostTasks` changes them."""

    def __init__(self) -> None:
        self._loops: dict[str, TaskLoop] = {}
        self._unreadable: dict[str, str] = {}
        self._being_created: dict[str, TaskSpec] = {}
        """Tasks whose record is being written now; they already count."""
        self._being_admitted: dict[object, tuple[str, str]] = {}
        """Task and image of each put that is being checked: the image must not be removed."""

    def get(self, task_id: str) -> TaskStatus:
        """Return the state of a task, or raise `NotFound`."""
        if task_id in self._unreadable:
            return _unreadable_status(task_id, self._unreadable[task_id])
        return status_of(self.record(task_id))

    def ended_run(self, task_id: str) -> str:
        """Return the invocation id of a task's latest ended run, or raise `NotFound`."""
        if not self.knows(task_id):
            raise NotFound(
                f"there is no task {task_id} on this machine; the record of its last run "
                "was removed with it",
                hint="logs without --previous shows the output that the journal still has",
            )
        ended = self.record(task_id).ended_invocation
        if not ended:
            raise NotFound(
                f"task {task_id} has no earlier run on this machine", hint="logs without --previous"
            )
        return ended

    def knows(self, task_id: str) -> bool:
        """Return whether the task exists."""
        return task_id in self._loops or task_id in self._unreadable

    def running(self, task_id: str) -> TaskRecord:
        """Return the record of a task that runs; raise `NotFound` or `Conflict`."""
        record = self.record(task_id)
        if record.state is not TaskState.RUNNING:
            raise Conflict(
                f"task {task_id} is {record.state}: a command can run only inside a running task"
            )
        return record

    def record(self, task_id: str) -> TaskRecord:
        """Return the record of a task, or raise `NotFound`."""
        return self._loop(task_id).record

    def _loop(self, task_id: str) -> TaskLoop:
        loop = self._loops.get(task_id)
        if loop is None:
            raise NotFound(f"there is no task {task_id} on this machine", hint="twine-agent ps")
        return loop

    def find_spec(self, task_id: str) -> TaskSpec | None:
        """Return the specification of a task, None for an unknown task."""
        loop = self._loops.get(task_id)
        return None if loop is None else loop.record.spec

    def active_specs(self) -> dict[str, TaskSpec]:
        """Return the specification of every task that runs or must run."""
        over = {t for t, loop in self._loops.items() if loop.record.state in OVER}
        return {t: spec for t, spec in self.wanted().items() if t not in over}

    def records(self) -> dict[str, TaskRecord]:
        """Return the records of all tasks, except unreadable ones."""
        return {t: loop.record for t, loop in self._loops.items()}

    def specs(self) -> dict[str, TaskSpec]:
        """Return the specification of every task, also of tasks that are being created."""
        created, loops = self._snapshot()
        return created | {t: loop.record.spec for t, loop in loops.items()}

    def _snapshot(self) -> tuple[dict[str, TaskSpec], dict[str, TaskLoop]]:
        """Return copies of the tasks that are being created, and of the loops of all others.

        Other threads call this, too, so each copy is atomic. A task becomes a loop before it is no
        longer being created. So the loops are copied last, and no task is missing from both.
        """
        created = self._being_created.copy()
        return created, self._loops.copy()

    def known(self) -> tuple[dict[str, KnownTask], list[str]]:
        """Return the facts of each task for accounts, and the ids of unreadable records."""
        tasks = {
            task_id: KnownTask(
                loop.record.state,
                loop.record.wanted is Wanted.GONE,
                loop.record.spec.image,
                tuple(paths_of(task_id, loop.record.spec, *KINDS_OF_A_TASK)),
                gate_for(loop.record.spec),
            )
            for task_id, loop in self._loops.items()
        }
        return tasks, sorted(self._unreadable)

    def all(self) -> list[TaskStatus]:
        """Return the state of all tasks, sorted by id."""
        known = [status_of(loop.record) for loop in self._loops.values()]
        unreadable = [_unreadable_status(t, why) for t, why in self._unreadable.items()]
        return sorted([*known, *unreadable], key=lambda s: s.task_id)

    def tasks_using(self, digest: str) -> list[str]:
        """Return the ids of the tasks that run from an image or are about to, sorted."""
        admitted = [t for t, image in self._being_admitted.copy().values() if image == digest]
        created, loops = self._snapshot()
        records = [(t, loop.record) for t, loop in loops.items()]
        specs = [*created.items(), *((t, r.spec) for t, r in records)]
        specs += [(t, r.previous) for t, r in records if r.previous is not None]
        return sorted({*admitted, *(t for t, spec in specs if spec.image == digest)})

    @contextmanager
    def _admitting(self, task_id: str, image: str) -> Iterator[None]:
        """Count a task as user of an image until the exit."""
        put = object()
        self._being_admitted[put] = task_id, image
        try:
            yield
        finally:
            del self._being_admitted[put]

    def wanted(self) -> dict[str, TaskSpec]:
        """Return the specifications of all wanted tasks, also of tasks that are being created."""
        records = self.records()
        wanted = {t: record.spec for t, record in records.items() if record.wanted is Wanted.RUN}
        return dict(self._being_created) | wanted

    def _others(self, task_id: str) -> dict[str, TaskSpec]:
        return {t: spec for t, spec in self.wanted().items() if t != task_id}

    def _unfinished_specs(self) -> dict[str, TaskSpec]:
        """Return the specifications of all tasks that are not over."""
        return {t: spec for t, spec in self.specs().items() if not self._is_over(t)}

    def _is_over(self, task_id: str) -> bool:
        return task_id in self._loops and is_over(self._loops[task_id].record)


def _unreadable_status(task_id: str, why: str) -> TaskStatus:
    return TaskStatus(
        task_id=bounded(task_id, ID_MAX),
        generation=0,
        epoch=0,
        state=TaskState.RUNNING,
        health=Health.UNKNOWN,
        reason=bounded(f"its record cannot be read ({why}); put or delete the task"),
        image="",
        unit=bounded(unit_of(task_id), ID_MAX),
    )
