"""Extra tasks in the core: what is known of them decides whether they may go."""

import pytest

from control_plane.agents.core.seen import SeenMachine
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord
from control_plane.api.updates import UpdatePolicy
from control_plane.scheduler.core.decide import decide
from control_plane.scheduler.core.decision import Seen
from control_plane.scheduler.core.moment import Moment


def serving(index: int, *, extra: bool = False) -> TaskRecord:
    return TaskRecord(
        index=index,
        version=1,
        generation=1,
        phase=TaskPhase.RUNNING,
        placement=Placement(machine=f"m{index}"),
        since=0.0,
        begun=0.0,
        listed=True,
        extra=extra,
    )


def machine(*, answering: bool) -> SeenMachine:
    return SeenMachine(up=True, answering=answering, ready=True)


@pytest.mark.parametrize("stale", [True, False])
def test_an_extra_task_of_which_nothing_is_heard_stays_until_its_machine_answers(stale: bool):
    """SC21: after a start of the control plane tasks serve although no machine answered yet."""
    spec = JobSpec(
        name="web",
        entitlement="web",
        tasks=2,
        image="sha256:" + "a" * 64,
        command=["/bin/web"],
        update=UpdatePolicy(max_unavailable=1, surge=1),
    )
    version = 2 if stale else 1
    record = JobRecord(
        name="web",
        spec=spec,
        version=version,
        generation=1,
        specs=dict.fromkeys(range(1, version + 1), spec),
        tasks=[serving(0), serving(1), serving(2, extra=True)],
    )
    view = {f"m{n}": machine(answering=False) for n in range(3)}
    made = decide(record, Seen(view, Moment(100.0, 100.0)))
    assert [task.phase for task in made.record.tasks] == [TaskPhase.RUNNING] * 3
    assert all(task.operation is None for task in made.record.tasks)
