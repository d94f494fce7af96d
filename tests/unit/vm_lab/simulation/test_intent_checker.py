"""The checker of a simulated region reports each violation, and nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent import api
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.endpoints import Endpoint, Endpoints
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskRecord, UpdatePolicy
from control_plane.scheduler.core.rollout import summarize
from control_plane.store import Put
from vm_lab.region import agent, quiescence, scenario
from vm_lab.region.clients import OwnedJob
from vm_lab.region.seed import SimulatedRegion

IMAGE = "sha256:" + "1" * 64
SPEC = JobSpec(
    name="web",
    entitlement="ent0",
    tasks=4,
    image=IMAGE,
    command=["x"],
    update=UpdatePolicy(max_unavailable=1),
)
WHERE = {"web-0": "m01", "web-1": "m02", "web-2": "m03", "web-3": "m04"}


class World:
    """A region whose machines receive commands only from the test."""

    def __init__(self) -> None:
        self.region = SimulatedRegion(scenario.load("everything"), 1)
        self.region.clients.jobs["web"] = OwnedJob(SPEC, SPEC, all_requested=(SPEC,))
        self.generation = 0

    def wait(self, seconds: float) -> None:
        self.region.timeline.run_until(self.region.timeline.now + seconds)

    def put(self, task: str, name: str, cores: float | None = None) -> None:
        """Start a task and wait until it serves."""
        self.generation += 1
        machine = self.region.machines[name]
        machine.images.add(IMAGE)
        made = api.TaskSpec(
            generation=self.generation,
            epoch=1,
            image=IMAGE,
            command=["x"],
            job="web",
            limits=api.Limits(memory_max_bytes=256 << 20, cpu_max_cores=cores),
        )
        agent.put_task(machine, task, made)
        self.wait(10)

    def delete(self, task: str, name: str) -> None:
        self.generation += 1
        agent.delete_task(self.region.machines[name], task, self.generation, 1)
        self.wait(10)

    def listed(self, *without: str) -> None:
        """Report all tasks except these to clients."""
        endpoints = [
            Endpoint(task=task, machine=name, host=name, ports={}, version=1)
            for task, name in WHERE.items()
            if task not in without
        ]
        made = Endpoints(job="web", revision=self.generation, endpoints=endpoints)
        self.region.checker.endpoints_changed(made)

    def accused(self) -> list[str]:
        return [v.text for v in self.region.checker.violations if v.rule == "budget"]


@pytest.fixture
def world() -> World:
    """Four tasks serve. One of them has moved, and its old copy was removed later."""
    found = World()
    found.put("web-0", "m00")
    for task, name in WHERE.items():
        found.put(task, name)
    found.delete("web-0", "m00")
    found.wait(100)
    found.listed()
    return found


@pytest.mark.behaviour("BUG-SI1")
def test_a_just_removed_machine_breaks_no_rule(world: World) -> None:
    """Formerly the task counted as failed from the removal of its old copy on."""
    world.region.machines["m01"].power_off()
    world.wait(1)
    world.listed("web-3")
    assert world.accused() == []


@pytest.mark.behaviour("BUG-SI1")
@pytest.mark.parametrize(("later_s", "accused"), [(1.0, 0), (5.0, 1)])
def test_a_decision_before_a_cancellation_may_be_written_shortly_after(
    world: World, later_s: float, accused: int
) -> None:
    """A pause lasts beyond the deadline, and both writes follow right after it."""
    world.region.machines["m01"].power_off()
    world.region.checker.budgets.maintenance_announced(["m04"], world.region.timeline.now + 1.0)
    world.wait(30)
    world.region.checker.budgets.maintenance_cancelled(["m04"])
    world.wait(later_s)
    world.listed("web-3")
    assert len(world.accused()) == accused


def test_a_long_failed_task_counts_when_another_is_stopped(world: World) -> None:
    world.region.machines["m01"].power_off()
    world.wait(30)
    world.listed("web-3")
    assert world.accused() == [
        "web: web-3 taken down with 2 of 4 left to serve, at most 1 may be away"
    ]


def test_two_taken_down_are_one_too_many(world: World) -> None:
    world.listed("web-2", "web-3")
    assert world.accused() == [
        "web: web-2, web-3 taken down with 2 of 4 left to serve, at most 1 may be away"
    ]


@pytest.mark.behaviour("BUG-SI2")
def test_a_job_may_wait_for_room_only_if_no_machine_has_room(world: World) -> None:
    """Formerly a job that wanted more than its entitlement may hold was never at rest."""
    region = world.region
    large = replace(SPEC, limits=api.Limits(memory_max_bytes=1 << 30, cpu_max_cores=7.5))
    region.clients.entitlements["ent0"] = EntitlementSpec(machines=2, host_profile="p")
    for name in ("m01", "m02"):
        region.checker.machines[name].entitlement = "ent0"
    assert not quiescence.is_full(region, large), "both have room"
    world.put("other-0", "m01", cores=1.0)
    assert not quiescence.is_full(region, large), "the other one has room"
    world.put("other-1", "m02", cores=1.0)
    assert quiescence.is_full(region, large)
    assert not quiescence.is_full(region, SPEC), "a smaller task has room"
    region.checker.machines["m02"].entitlement = ""
    assert not quiescence.is_full(region, large), "it may have another machine"


@pytest.mark.behaviour("BUG-SI2")
@pytest.mark.parametrize(("waiting", "most", "bound"), [(1, 1, True), (2, 1, True), (1, 2, False)])
def test_a_release_waits_at_rest_while_tasks_without_room_use_up_the_budget(waiting, most, bound):
    """A job with a task that never finds room may not be updated, and is at rest."""
    spec = replace(SPEC, update=UpdatePolicy(max_unavailable=most))
    there = Placement(machine="m01")
    tasks = [
        TaskRecord(index=i, version=1, generation=1, placement=None if i < waiting else there)
        for i in range(4)
    ]
    status = summarize(JobRecord(name="web", spec=spec, version=2, specs={}, tasks=tasks))
    assert quiescence.is_update_blocked(status) is bound


@pytest.mark.parametrize(("paused_s", "accused"), [(1.9, 0), (2.6, 1)])
def test_a_short_pause_does_not_restart_a_silence(
    world: World, paused_s: float, accused: int
) -> None:
    """Seed 4366: a pause below two seconds counts as a busy host."""
    checker = world.region.checker
    world.region.machines["m01"].power_off()
    world.wait(6)
    checker.plane_changed("frozen")
    world.wait(paused_s)
    checker.plane_changed("thawed")
    world.wait(4)
    assert checker.machines["m01"].state == "up"
    checker.stored("main", [Put("machines/dc0/m01", b'{"machine":"m01","state":"down"}')])
    assert sum(v.rule == "verdict" for v in checker.violations) == accused


@pytest.mark.parametrize(("later_s", "accused"), [(1.0, 0), (5.0, 1)])
def test_a_host_may_be_changed_by_hand_while_a_task_moves_to_it(
    world: World, later_s: float, accused: int
) -> None:
    """Seed 5204: the report of a drift and the start of a task crossed in transfer."""
    checker, machine = world.region.checker, world.region.machines["m05"]
    checker.violations.clear()
    machine.profile.wanted = api.ProfileSpec(name="soft")
    machine.profile.status = api.ProfileStatus(name="soft", state=api.ProfileState.VERIFIED)
    machine.profile.drift()
    world.wait(later_s)
    world.put("other-0", "m05")
    assert sum(v.rule == "profile" for v in checker.violations) == accused


def test_a_job_that_is_stopped_and_recreated_may_be_absent_in_between(world: World) -> None:
    """Seeds 3771, 5308: the stop was carried out and its answer was lost. That is no error."""
    clients = world.region.clients
    assert clients.is_acknowledged("web")
    clients.stop_job("web")
    clients.apply_job(SPEC)
    assert not clients.is_acknowledged("web")


@pytest.mark.behaviour("BUG-LB15")
def test_a_leftover_task_of_best_effort_work_is_named_as_a_reason(world: World) -> None:
    """Formerly the check ended with a `KeyError`, and the region named no reason."""
    machine = world.region.machines["m07"]
    machine.images.add(IMAGE)
    spec = api.TaskSpec(generation=1, epoch=1, image=IMAGE, command=["x"], job="work0")
    agent.put_task(machine, "work0-0", replace(spec, limits=api.Limits(memory_max_bytes=1 << 20)))
    reasons: list[str] = []
    quiescence._check_copies(world.region, dict(WHERE), set(), reasons)
    assert [r for r in reasons if "work0" in r] == [
        "work0-0 is recorded on no machine and there on m07"
    ]
