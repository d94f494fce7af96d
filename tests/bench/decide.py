"""How long does a decision about one job take: after a change of a task's health, and in a release?

    python -m tests.bench.decide [--json]

Goals: 20 ms of CPU time for a job of 1,000 tasks, 300 ms for one of 15,000. This includes commands
and stored records: everything in a round except the allocator.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from msgspec.structs import replace

from agent.api import Health, TaskState, TaskStatus
from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import (
    JobRecord,
    JobSpec,
    Placement,
    TaskPhase,
    TaskRecord,
    UpdatePolicy,
    task_id,
)
from control_plane.api.stored_jobs import changed_chunks, chunks_in_turn
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decide import begin_operations, decide
from control_plane.scheduler.core.decision import DecisionInput, FoundPlaces
from control_plane.scheduler.core.task_commands import commands

IMAGE = "sha256:" + "1" * 64
PER_MACHINE = 4
ROUNDS = 5
NOW = Moment(wall=1.8e9, steady=1000.0)


def a_job(tasks: int) -> tuple[JobRecord, dict[str, ObservedMachine]]:
    """Return a job whose tasks are all healthy, and its machines."""
    spec = JobSpec(
        name="web",
        entitlement="front",
        tasks=tasks,
        image=IMAGE,
        command=["/x"],
        update=UpdatePolicy(max_unavailable=max(1, tasks // 100)),
    )
    records = [
        TaskRecord(
            index=i,
            version=1,
            generation=i + 1,
            phase=TaskPhase.RUNNING,
            placement=Placement(machine=f"m{i // PER_MACHINE:05}", ports={"http": 20_000}),
            listed=True,
            begun=0.0,
            health=Health.HEALTHY,
            state=TaskState.RUNNING,
        )
        for i in range(tasks)
    ]
    seen: dict[str, dict[str, TaskStatus]] = {}
    for task in records:
        assert task.placement is not None
        name = task_id("web", task.index)
        seen.setdefault(task.placement.machine, {})[name] = TaskStatus(
            task_id=name,
            generation=task.generation,
            epoch=1,
            state=TaskState.RUNNING,
            health=Health.HEALTHY,
            image=IMAGE,
            job="web",
        )
    view = {
        name: ObservedMachine(up=True, answering=True, ready=True, tasks=those)
        for name, those in seen.items()
    }
    record = JobRecord(
        name="web", spec=spec, version=1, specs={1: spec}, tasks=records, generation=tasks
    )
    return record, view


def a_round(record: JobRecord, view: dict[str, ObservedMachine]) -> int:
    """Decide as the scheduler does; return how many chunks of tasks are written."""
    seen = DecisionInput(view, NOW)
    made = decide(record, seen)
    if made.chosen:
        begin_operations(made, FoundPlaces(ready=frozenset(made.chosen)), seen)
    changed = changed_chunks(record, made.record)
    dict(chunks_in_turn(made.record, changed))
    commands(made.record, view)
    return len(changed)


def best_ms(work: Callable[[], object]) -> float:
    """Return the least CPU time of some rounds, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times) * 1e3


def measured(tasks: int) -> dict[str, float]:
    """Return the cost of a change of one task's health, and of a round of a release."""
    record, view = a_job(tasks)
    machine = view["m00000"]
    sick = {name: replace(s, restarts=1) for name, s in machine.tasks.items()}
    changed = view | {"m00000": ObservedMachine(up=True, answering=True, ready=True, tasks=sick)}
    spec = replace(record.spec, command=["/y"])
    newer = replace(record, spec=spec, version=2, specs={1: record.spec, 2: spec})
    return {
        f"health_ms_{tasks}": round(best_ms(lambda: a_round(record, changed)), 1),
        f"health_chunks_{tasks}": a_round(record, changed),
        f"release_ms_{tasks}": round(best_ms(lambda: a_round(newer, view)), 1),
        f"release_chunks_{tasks}": a_round(newer, view),
    }


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measured(1_000) | measured(15_000)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:8}")


if __name__ == "__main__":
    main()
