"""When a task that is left behind has certainly ended, so that there is no second copy.

Only jobs whose `disconnect` says `stop` wait for that while a machine is down: their hosts end
them when they are not heard from (docs/adr/0024). Others are placed elsewhere at once, and may
run twice meanwhile. Whatever the job says, a start that was not sent yet waits as soon as the
old machine is up again: what is left there is ended first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from agent.api import TaskState, certainly_ended_s
from control_plane.agents.core.seen import SeenMachine, View
from control_plane.api.jobs import JobRecord, JobSpec

_ENDED = (TaskState.STOPPED, TaskState.FAILED)


def ended_in_s(spec: JobSpec, task: str, machine: SeenMachine | None) -> float:
    """Return in how many seconds a task has certainly ended on its machine, or nobody minds.

    Infinite while it is seen to run. A machine that is not known any more was removed by an
    operator, who says so that it is gone.
    """
    after_s = certainly_ended_s(spec.disconnect, spec.stop_timeout_s)
    if after_s is None or machine is None:
        return 0.0
    if machine.up and machine.answering:
        status = machine.tasks.get(task)
        return 0.0 if status is None or status.state in _ENDED else inf
    return max(0.0, after_s - machine.unheard_s)


def staying(leaving: Mapping[str, Sequence[str]], view: View) -> dict[str, str]:
    """Return which tasks that moved away are not gone from a machine that is up: task → machine.

    Also while it does not answer for a moment: until it is down, or has said what it runs.
    """
    return {
        task: name
        for name, tasks in leaving.items()
        if (machine := view.get(name)) is not None and machine.up
        for task in tasks
        if not machine.answering or task in machine.tasks
    }


def second_copies(record: JobRecord, view: View) -> list[str]:
    """Return what may run twice: tasks that moved away from machines that cannot be asked.

    What its host has certainly ended by now is none of them.
    """
    may_last = certainly_ended_s(record.spec.disconnect, record.spec.stop_timeout_s) is None
    return [
        f"{name} may still run on {machine}, which is cut off"
        for machine in sorted(record.leaving)
        if (seen := view.get(machine)) is not None and not seen.answering
        for name in record.leaving[machine]
        if may_last or ended_in_s(record.spec, name, seen) > 0
    ]
