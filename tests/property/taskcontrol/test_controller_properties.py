"""Shipped controllers keep their guarantees in long runs of failures and releases, which end.

The model is a scheduler without a budget: it begins every acknowledged task, which comes back after
some time. Machines fail at any time.
"""

from collections import Counter

import pytest
from controller_requests import MONDAY, a_request, acked, an_update
from hypothesis import given, settings
from hypothesis import strategies as st

from taskcontrol.quorum import Quorum
from taskcontrol.shards import Sharded
from taskcontrol.stateless import Stateless
from taskcontrol.windows import Never

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("wait", "fail", "back", "done", "change")), st.integers(min_value=0)
    ),
    max_size=40,
)


class Job:
    """Tasks to be updated; some are away because of a failure or an acknowledgement."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.outdated = set(range(tasks))
        self.failed: set[int] = set()
        self.going: list[int] = []
        self.order: list[int] = []

    @property
    def down(self) -> set[int]:
        return self.failed | set(self.going)

    def request(self, at: float = MONDAY):
        pending = [an_update(t) for t in sorted(self.outdated - set(self.going))]
        return a_request(self.tasks, *pending, down=sorted(self.down), at=at)

    def begin(self, response) -> list[int]:
        """Begin the acknowledged tasks; return those that served until now."""
        begun = [int(ack[1:]) for ack in acked(response)]
        assert len(begun) == len(set(begun))
        assert set(begun) <= self.outdated - set(self.going)
        serving = [task for task in begun if task not in self.down]
        self.going += begun
        self.order += begun
        return serving

    def happens(self, what: str, number: int) -> None:
        if what == "fail":
            self.failed.add(number % self.tasks)
        elif what == "back" and self.failed:
            self.failed.remove(sorted(self.failed)[number % len(self.failed)])
        elif what == "done" and self.going:
            self.outdated.discard(self.going.pop(number % len(self.going)))

    def heal(self) -> None:
        self.failed.clear()
        while self.going:
            self.happens("done", 0)


def finish(job: Job, answer) -> None:
    """Without further failures every release ends."""
    for _ in range(4 * job.tasks + 4):
        job.heal()
        if not job.outdated:
            return
        job.begin(answer(job.request()))
    raise AssertionError(f"{len(job.outdated)} tasks are never updated")


@pytest.mark.behaviour("TC13")
@given(tasks=st.integers(3, 9), leader=st.integers(0, 8), steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_an_ensemble_never_loses_its_majority_to_an_operation(tasks, leader, steps):
    job, leading = Job(tasks), leader % tasks

    def answer(request):
        return Quorum().answer(request, leading)

    for what, number in steps:
        if what == "change":  # an election: the leader may be another task, or absent for a moment
            leading = None if number % 3 == 0 else number % tasks
        job.happens(what, number)
        before = job.down
        pending = job.outdated - set(job.going)
        taken = job.begin(answer(job.request()))
        assert len(taken) <= 1
        if taken:
            assert tasks - len(job.down) >= tasks // 2 + 1
            assert leading is not None
        if leading in taken:  # the leader is the last of those that serve
            assert pending - before == {leading}
    leading = leader % tasks
    finish(job, answer)


@pytest.mark.behaviour("TC12", "TC14")
@given(
    tasks=st.integers(3, 12),
    shards=st.lists(st.sets(st.integers(0, 11), min_size=2, max_size=3), max_size=20),
    most=st.integers(1, 2),
    at_once=st.none() | st.integers(1, 3),
    steps=STEPS,
)
@settings(max_examples=150, deadline=None)
def test_no_shard_loses_a_second_replica_to_an_operation(tasks, shards, most, at_once, steps):
    held: dict[int, set[str]] = {}
    for number, replicas in enumerate(shards):
        for task in replicas:
            held.setdefault(task % tasks, set()).add(f"s{number}")
    job, rule = Job(tasks), Sharded(most_down=most, at_once=at_once)
    for what, number in steps:
        job.happens(what, number)
        taken = job.begin(rule.answer(job.request(), held))
        away = Counter(shard for task in job.down for shard in held.get(task, ()))
        assert all(away[shard] <= most for task in taken for shard in held.get(task, ()))
        assert at_once is None or not taken or len(job.down) <= at_once
    finish(job, lambda request: rule.answer(request, held))


@pytest.mark.behaviour("TC14")
@given(
    tasks=st.integers(1, 60),
    loads=st.lists(st.floats(0, 1), min_size=1, max_size=10),
    at_most=st.floats(0, 1),
    at_least=st.integers(1, 3),
    steps=STEPS,
)
@settings(max_examples=150, deadline=None)
def test_those_that_are_left_can_carry_the_load(tasks, loads, at_most, at_least, steps):
    job, rule = Job(tasks), Stateless(at_most=at_most, at_least=at_least)
    for number, (what, which) in enumerate(steps):
        job.happens(what, which)
        load = loads[number % len(loads)]
        to_do = load * (tasks - len(job.down))
        taken = job.begin(rule.answer(job.request(), load))
        left = tasks - len(job.down)
        if taken and len(job.down) > at_least:
            assert to_do <= left * rule.full_load + 1e-6
            assert len(job.down) <= at_most * tasks
    finish(job, lambda request: rule.answer(request, 1.0))


@given(at=st.floats(0, 14 * 86_400), steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_in_a_window_no_task_that_serves_is_taken(at, steps):
    never, job = Never.of(["mon-fri 09:00-17:00", "sat 22:00-06:00"]), Job(5)
    for what, number in steps:
        job.happens(what, number)
        request = job.request(MONDAY + at)
        taken = job.begin(Stateless(at_least=2).answer(never.left(request), 1.0))
        if never.is_now(MONDAY + at):
            assert not taken
