"""Decides when a task on a lost machine has certainly ended, so that there is no second copy.

Only jobs with `disconnect` `stop` wait for that while a machine is down: its host ends such tasks
when it loses contact (docs/adr/0024). Other tasks are placed elsewhere at once, and may run twice
meanwhile. Once the old machine is up again, a start that was not sent yet waits until the old copy
has ended, for all jobs.

The specification that a copy was started with decides until it is certainly gone (docs/adr/0130).
A version with `stop` starts only where no copy of a version with `keep` may still run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from msgspec.structs import replace

from agent.api import TaskState, certainly_ended_s
from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, TaskRecord, spec_of, task_id

ENDED = (TaskState.STOPPED, TaskState.FAILED)


def ended_in_s(spec: JobSpec, task: str, machine: ObservedMachine | None) -> float:
    """Return in how many seconds a task has certainly ended on its machine.

    0: it has ended, or a second copy is allowed; infinite while its agent reports it running. An
    unknown machine was removed by an operator, which confirms that it is gone.
    """
    after_s = certainly_ended_s(spec.disconnect, spec.stop_timeout_s)
    if after_s is None or machine is None:
        return 0.0
    if machine.up and machine.answering:
        status = machine.tasks.get(task)
        return 0.0 if status is None or status.state in ENDED else inf
    return max(0.0, after_s - machine.no_report_s)


def staying(leaving: Mapping[str, Sequence[str]], view: View) -> dict[str, str]:
    """Return task → machine for tasks that moved away but are still on a machine that is up.

    Includes the tasks of a machine that does not answer for a moment, until it is down or reports.
    """
    return {
        task: name
        for name, tasks in leaving.items()
        if (machine := view.get(name)) is not None and machine.up
        for task in tasks
        if not machine.answering or task in machine.tasks
    }


def second_copies(record: JobRecord, view: View) -> list[str]:
    """Describe which tasks may run twice: they moved away from unreachable machines.

    Tasks that their host has certainly ended by now are not included.
    """
    return [
        f"{_may_run(name, machine)}, which is cut off"
        for machine in sorted(record.lasting)
        if (seen := view.get(machine)) is not None and not seen.answering
        for name in record.lasting[machine]
    ]


def reason_to_wait(record: JobRecord, task: TaskRecord, spec: JobSpec) -> str:
    """Return why a task must not start with a specification yet; empty: it may.

    The specification allows no second copy, and an earlier copy may run while its machine does
    not answer.
    """
    if _keeps_running(spec):
        return ""
    name = task_id(record.name, task.index)
    for machine, names in record.lasting.items():
        if name in names:
            return _may_run(name, machine)
    if (
        task.phase is TaskPhase.LOST
        and task.placement is not None
        and _keeps_running(spec_of(record, task))
    ):
        return _may_run(name, task.placement.machine)
    return ""


class LeftBehind:
    """Copies that tasks leave on unreachable machines, to be stored with their job."""

    def __init__(self, record: JobRecord) -> None:
        """Begin with the copies in the record."""
        self._record = record
        self._leaving = {machine: set(ids) for machine, ids in record.leaving.items()}
        self._lasting = {machine: set(ids) for machine, ids in record.lasting.items()}

    def add(self, task: TaskRecord) -> None:
        """Note that a task leaves its machine, and whether its copy may last there."""
        if task.placement is None:
            return
        name = task_id(self._record.name, task.index)
        self._leaving.setdefault(task.placement.machine, set()).add(name)
        if _keeps_running(spec_of(self._record, task)):
            self._lasting.setdefault(task.placement.machine, set()).add(name)

    def drop_gone(self, view: View) -> None:
        """Drop the copies that are known to be gone."""
        for name in list(self._leaving):
            machine = view.get(name)
            if machine is None:
                self._leaving[name] = set()
            elif machine.up and machine.answering:
                self._leaving[name] &= machine.tasks.keys()

    def into(self, record: JobRecord) -> JobRecord:
        """Return the record with the copies that are left; the same one if they are unchanged."""
        leaving = {machine: sorted(ids) for machine, ids in self._leaving.items() if ids}
        lasting = {
            machine: kept
            for machine, ids in self._lasting.items()
            if (kept := sorted(ids.intersection(leaving.get(machine, ()))))
        }
        if leaving == record.leaving and lasting == record.lasting:
            return record
        return replace(record, leaving=leaving, lasting=lasting)


def _keeps_running(spec: JobSpec) -> bool:
    return certainly_ended_s(spec.disconnect, spec.stop_timeout_s) is None


def _may_run(task: str, machine: str) -> str:
    return f"{task} may still run on {machine}"
