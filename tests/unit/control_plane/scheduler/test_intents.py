"""Intents in the assembled control plane: push, size, canary and hold by different writers."""

import asyncio
from collections import Counter

import pytest
from fake_agents import IMAGE_2
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region, scenario

from agent.api import Health, TaskSpec
from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    IntentChange,
    PushChange,
    SizeChange,
)
from control_plane.api.intents import StoredIntent, part_of
from control_plane.api.inventory import Drain
from control_plane.api.jobs import JobPhase, JobRecord, Placement, TaskPhase, TaskRecord
from control_plane.api.stored_jobs import intent_of, record_of
from control_plane.api.updates import Canary, UpdatePolicy
from control_plane.scheduler.core.rollout import wanted_tasks
from control_plane.scheduler.core.task_spec import task_spec
from wire.errors import Conflict, InvalidInput

OTHER, THIRD = ["/bin/other"], ["/bin/third"]
FAST = UpdatePolicy(drain_s=0.0, max_unavailable=3)
DEPLOYER, SCALER, TESTER, OPERATOR = "user:conveyor", "user:scaler", "user:tester", "user:sre"


def counts(w: World) -> Counter[int]:
    return Counter(task.version for task in w.cp._jobs.get("web").tasks)


def indexes(w: World, version: int) -> set[int]:
    return {task.index for task in w.cp._jobs.get("web").tasks if task.version == version}


def sent_spec(w: World, task: TaskRecord) -> TaskSpec:
    """Return the specification that the machine of a task received."""
    return w.region.machines[task.placement.machine].specs[f"web-{task.index}"]


def push_of(share: float, **changes) -> PushChange:
    spec = a_job(1, **({"command": OTHER, "update": FAST} | changes))
    return PushChange(spec=spec, share=share)


@pytest.mark.behaviour("JC3", "JC5", "SC20")
@scenario()
async def test_half_of_the_job_stays_half_at_every_size(w: World):
    """Figure 6 of the article. The old procedure ended with 100 % (figure 4)."""
    await w.deployed(a_job(10, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    await w.stable()
    assert counts(w) == {1: 5, 2: 5}
    for size in (5, 9, 4, 12, 1, 7):
        before = {v: indexes(w, v) for v in (1, 2)}
        await w.cp.intents.size("web", SizeChange(tasks=size), SCALER)
        await w.stable()
        new = part_of(0.5, size)
        assert counts(w) == Counter({1: size - new, 2: new})
        if size < sum(map(len, before.values())):  # no task changed; each version lost its share
            assert all(indexes(w, v) <= before[v] for v in (1, 2))
    await w.cp.intents.push("web", PushChange(share=1.0), DEPLOYER)
    await w.stable()
    assert counts(w) == {2: 7}


@pytest.mark.behaviour("JC7", "CV2")
@scenario()
async def test_a_push_to_a_number_of_tasks_holds_at_every_size(w: World):
    """The first stage of a push is a number of tasks; the next stage keeps them."""
    await w.deployed(a_job(6, update=FAST))
    push = PushChange(spec=a_job(1, command=OTHER, update=FAST), tasks=2)
    await w.cp.intents.push("web", push, DEPLOYER)
    await w.stable()
    for size in (6, 12, 3, 1, 8):
        await w.cp.intents.size("web", SizeChange(tasks=size), SCALER)
        await w.stable()
        assert counts(w) == Counter({2: min(2, size)}) + Counter({1: max(0, size - 2)})
    first = indexes(w, 2)
    await w.cp.intents.push("web", PushChange(share=0.5), DEPLOYER)
    await w.stable()
    assert counts(w) == {1: 4, 2: 4}
    assert first <= indexes(w, 2)


@pytest.mark.behaviour("CV1")
@scenario()
async def test_a_push_of_the_former_image_restarts_no_task_that_runs_it(w: World):
    """A stage is rolled back by a push on top of the one that its writer knows."""
    await w.deployed(a_job(6, update=FAST))
    image = w.cp._jobs.get("web").spec.image
    before = {t.index: t.generation for t in w.cp._jobs.get("web").tasks}
    shown = await w.cp.intents.push("web", PushChange(image=IMAGE_2, tasks=2), DEPLOYER)
    await w.stable()
    changed = indexes(w, 2)
    assert len(changed) == 2
    expect = shown.intents[0].intent.version
    with pytest.raises(Conflict, match="and the request replaces version"):
        await w.cp.intents.push("web", PushChange(image=image, expect=expect - 1), DEPLOYER)
    back = PushChange(image=image, expect=expect, reason="it fails")
    await w.cp.intents.push("web", back, DEPLOYER)
    await w.stable()
    record = w.cp._jobs.get("web")
    assert (counts(w), record.spec.image) == ({3: 6}, image)
    assert all(
        (task.generation == before[task.index]) == (task.index not in changed)
        for task in record.tasks
    )
    assert record.rollout is not None
    assert record.rollout.reason == "it fails"


@scenario()
async def test_a_released_push_belongs_to_the_next_writer(w: World):
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.push("web", push_of(1.0), DEPLOYER)
    with pytest.raises(Conflict, match="user:conveyor is its writer"):
        await w.cp.apply_job(a_job(4, update=FAST, command=THIRD), writer="user:ann")
    await w.cp.intents.push("web", PushChange(gives_back=True), DEPLOYER)
    await w.stable()
    assert counts(w) == {2: 4}
    await w.cp.apply_job(a_job(4, update=FAST, command=THIRD), writer="user:ann")
    await w.stable()
    assert counts(w) == {3: 4}


@scenario()
async def test_the_size_changes_while_a_push_is_under_way(w: World):
    await w.deployed(a_job(10, update=FAST))
    await w.cp.intents.push("web", push_of(0.3), DEPLOYER)
    await w.cp.intents.size("web", SizeChange(tasks=6), SCALER)
    await w.stable()
    assert counts(w) == {1: 4, 2: 2}
    await w.cp.intents.push("web", PushChange(share=0.75), DEPLOYER)
    await w.cp.intents.size("web", SizeChange(tasks=8), SCALER)
    await w.stable()
    assert counts(w) == {1: 2, 2: 6}


@scenario()
async def test_a_smaller_share_brings_tasks_back_to_what_they_were(w: World):
    await w.deployed(a_job(6, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    await w.stable()
    stay = indexes(w, 1)
    await w.cp.intents.push("web", PushChange(share=0.0), DEPLOYER)
    await w.stable()
    assert counts(w) == {1: 6}
    assert stay <= indexes(w, 1)
    causes = {e.cause for e in (await w.cp.job_events("web")).events if e.kind == "update"}
    assert "rollback" in causes


@scenario()
async def test_the_share_is_exact_again_after_a_machine_fails(w: World):
    await w.deployed(a_job(6, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    await w.stable()
    w.region.machines["m1"].power_off()
    await w.until(lambda: w.endpoints_count(6), 600)
    await w.stable(within_s=600)
    assert counts(w) == {1: 3, 2: 3}


@pytest.mark.behaviour("JC6", "JC7", "JC10", "SC15")
@scenario()
async def test_canaries_run_in_addition_to_the_push_and_end_in_time(w: World):
    """A canary does not dilute the push, and does not count as its progress."""
    await w.deployed(a_job(10, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    await w.stable()
    pushed = indexes(w, 2)
    change = CanaryChange(tasks=2, environment={"X": "1"}, lasts_s=600)
    shown = await w.cp.intents.canary("web", change, TESTER)
    await w.stable()
    assert counts(w) == {1: 3, 2: 5, 3: 2}
    assert indexes(w, 2) == pushed
    assert {c.version: c.wanted for c in shown.versions} == {1: 3, 2: 5, 3: 2}
    record = w.cp._jobs.get("web")
    assert record.specs[3].environment == {"X": "1"}
    assert record.specs[3].command == record.specs[1].command
    await w.cp.intents.push("web", PushChange(share=1.0), DEPLOYER)
    await w.stable()
    assert counts(w) == {2: 8, 3: 2}
    await asyncio.sleep(600)
    await w.stable()
    assert counts(w) == {2: 10}
    assert 3 not in w.cp._jobs.get("web").specs
    await w.cp.apply_job(a_job(10, update=FAST, command=THIRD))
    await w.stable()
    assert counts(w) == {4: 10}  # the number of a canary is not used again


@pytest.mark.behaviour("JC14")
@scenario()
async def test_a_canary_changes_the_image_the_configuration_or_both(w: World):
    """Code and configuration are tried on the same tasks, and end together."""
    first = {"app.toml": "pool = 1", "log.toml": "level = 1"}
    await w.deployed(a_job(4, update=FAST, configuration=first))
    tried = {"app.toml": "pool = 9"}
    changes = [
        CanaryChange(configuration=tried, lasts_s=9e4),
        CanaryChange(command=OTHER, lasts_s=9e4),
        CanaryChange(command=OTHER, configuration=tried, lasts_s=9e4),
    ]
    for change in changes:
        await w.cp.intents.canary("web", change, TESTER)
        await w.stable()
        (on_trial,) = [t for t in w.cp._jobs.get("web").tasks if t.version != 1]
        spec = w.cp._jobs.get("web").specs[on_trial.version]
        assert spec.configuration == first | change.configuration
        assert (spec.command == OTHER) is bool(change.command)
        assert sent_spec(w, on_trial).configuration == spec.configuration
        assert sent_spec(w, on_trial).command[0] == spec.command[0]
    await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
    await w.stable()
    assert counts(w) == {1: 4}


@pytest.mark.behaviour("JC14")
@scenario()
async def test_a_push_brings_a_configuration_to_its_share_and_a_rollback_takes_it_back(w: World):
    await w.deployed(a_job(4, update=FAST, configuration={"app.toml": "pool = 1"}))
    change = PushChange(configuration={"app.toml": "pool = 2"}, share=0.5)
    await w.cp.intents.push("web", change, DEPLOYER)
    await w.stable()
    assert counts(w) == {1: 2, 2: 2}
    assert {sent_spec(w, t).configuration["app.toml"] for t in w.cp._jobs.get("web").tasks} == {
        "pool = 1",
        "pool = 2",
    }
    await w.cp.intents.push("web", PushChange(share=0.0), DEPLOYER)
    await w.stable()
    assert {sent_spec(w, t).configuration["app.toml"] for t in w.cp._jobs.get("web").tasks} == {
        "pool = 1"
    }


@scenario()
async def test_a_configuration_that_is_too_large_with_that_of_the_job_is_refused(w: World):
    half = "x" * (32 << 10)
    await w.deployed(a_job(1, update=FAST, configuration={"a": half, "b": half}))
    with pytest.raises(InvalidInput, match="the maximum is 65536"):
        await w.cp.intents.canary("web", CanaryChange(configuration={"c": "y"}, lasts_s=60), TESTER)
    with pytest.raises(InvalidInput, match="a credential has the same name"):
        await w.cp.apply_job(a_job(1, configuration={"a": ""}, credentials={"a": "key"}))


@scenario()
async def test_a_canary_ends_when_it_is_withdrawn_and_a_rollback_never_goes_to_it(w: World):
    await w.deployed(a_job(6, update=FAST))
    await w.cp.apply_job(a_job(6, update=FAST, command=OTHER))
    await w.stable()
    await w.cp.intents.canary("web", CanaryChange(tasks=1, command=THIRD, lasts_s=9e4), TESTER)
    await w.stable()
    assert counts(w) == {2: 5, 3: 1}
    await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
    await w.stable()
    assert counts(w) == {2: 6}
    await w.cp.intents.canary("web", CanaryChange(tasks=1, command=THIRD, lasts_s=9e4), TESTER)
    await w.stable()
    await w.cp.rollback_job("web")
    record = w.cp._jobs.get("web")
    assert record.spec.command == record.specs[1].command


ENDING = (TaskPhase.DRAINING, TaskPhase.STOPPING)


def report_on_trial(w: World, **changes) -> int:
    """Change the report of the first canary task; return its index."""
    task = next(t for t in w.cp._jobs.get("web").tasks if t.version == 3)
    w.region.machines[task.placement.machine].report(f"web-{task.index}", **changes)
    return task.index


@pytest.mark.behaviour("JC8")
@scenario()
async def test_a_canary_that_fails_ends_at_once_and_its_tasks_go_back_first(w: World):
    """Priority: the end of a failed canary, then maintenance, then push."""
    slow = replace(FAST, max_unavailable=1, health_gate_s=30.0)
    await w.deployed(a_job(6, update=slow))
    await w.cp.intents.push("web", push_of(0.5, update=slow), DEPLOYER)
    await w.stable()
    change = CanaryChange(tasks=2, command=THIRD, lasts_s=9e4)
    await w.cp.intents.canary("web", change, TESTER)
    await w.stable()
    assert counts(w) == {1: 1, 2: 3, 3: 2}
    trials = indexes(w, 3)
    placed = {t.index: t.placement.machine for t in w.cp._jobs.get("web").tasks}
    other = next(machine for i, machine in placed.items() if i not in trials)
    failed = report_on_trial(w, health=Health.UNHEALTHY)
    await w.until(lambda: w.cp._jobs.get("web").intents["canary"].value is None)
    await w.cp.inventory.drain(Drain(machines=[other], reason="work"))
    await w.cp.intents.push("web", PushChange(share=1.0), DEPLOYER)
    order = list[int]()

    def all_ended() -> bool:
        going = [t.index for t in w.cp._jobs.get("web").tasks if t.phase in ENDING]
        order.extend(index for index in going if index not in order)
        return len(order) >= 4

    await w.until(all_ended, 600)
    assert set(order[:2]) == trials
    intent = w.cp._jobs.get("web").intents["canary"]
    assert intent.value is None
    assert intent.writer == TESTER
    assert f"it failed on web-{failed}" in intent.reason
    await w.until(lambda: counts(w) == {2: 6}, 600)


@pytest.mark.behaviour("JC8")
@scenario()
async def test_under_a_hold_a_canary_that_fails_stays_as_it_is(w: World):
    """Priority: hold, then the end of a failed canary."""
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    await w.stable()
    await w.cp.intents.canary("web", CanaryChange(command=THIRD, lasts_s=9e4), TESTER)
    await w.stable()
    await w.cp.intents.hold("web", HoldChange(lasts_s=300), OPERATOR)
    report_on_trial(w, health=Health.UNHEALTHY)
    await asyncio.sleep(200)
    assert counts(w) == {1: 1, 2: 2, 3: 1}
    await asyncio.sleep(200)
    await w.stable()
    assert counts(w) == {1: 2, 2: 2}


@pytest.mark.behaviour("JC8")
@scenario()
async def test_under_a_hold_nothing_begins_and_failures_are_repaired(w: World):
    """Priority: hold, then push, then size."""
    await w.deployed(a_job(6, update=FAST))
    await w.cp.intents.hold("web", HoldChange(lasts_s=3600, reason="the cup final"), OPERATOR)
    await w.cp.intents.push("web", push_of(1.0), DEPLOYER)
    shown = await w.cp.intents.size("web", SizeChange(tasks=9), SCALER)
    assert {v.dimension: v.waits_for for v in shown.intents} == {
        "hold": "",
        "push": "the job is held",
        "size": "the job is held",
    }
    await asyncio.sleep(300)
    assert counts(w) == {1: 6}
    status = await w.cp.get_job("web")
    assert status.phase is JobPhase.WAITING
    assert status.detail == "the job is held (the cup final): version 2 and the size of 9 waits"
    w.region.machines["m1"].power_off()
    await asyncio.sleep(1200)
    assert counts(w) == {1: 6}
    assert await w.endpoints_count(6)
    await asyncio.sleep(2400)  # the hold expires
    await w.stable()
    assert counts(w) == {2: 9}


@pytest.mark.behaviour("BUG-UX122")
@scenario()
async def test_under_a_hold_only_postponed_dimensions_wait(w: World):
    """A push and a size in force were shown as waiting for a hold. A waiting size was not shown."""
    await w.deployed(a_job(4, update=FAST))
    held = await w.cp.intents.hold("web", HoldChange(lasts_s=3600), OPERATOR)
    assert {v.waits_for for v in held.intents} == {""}
    shown = await w.cp.intents.size("web", SizeChange(tasks=6), SCALER)
    assert {v.dimension: v.waits_for for v in shown.intents if v.waits_for} == {
        "size": "the job is held"
    }
    assert {v.dimension: v.effect for v in shown.intents}["size"] == "4 tasks (6 requested)"
    shown = await w.cp.intents.canary("web", CanaryChange(command=THIRD, lasts_s=9e4), TESTER)
    waiting = {v.dimension for v in shown.intents if v.waits_for}
    assert waiting == {"canary", "size"}


@pytest.mark.behaviour("JC2", "JC15", "FE8")
@scenario()
async def test_a_stale_writer_gets_an_error_and_others_are_not_in_its_way(w: World):
    """Each dimension has its own writer and version."""
    await w.deployed(a_job(4, update=FAST))
    first = await w.cp.intents.size("web", SizeChange(tasks=5), SCALER)
    seen = {v.dimension: v.intent.version for v in first.intents}
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)  # a write of another dimension
    await w.cp.intents.size("web", SizeChange(tasks=6, expect=seen["size"]), SCALER)
    with pytest.raises(Conflict, match="at version 3, and the request replaces version 2"):
        await w.cp.intents.size("web", SizeChange(tasks=4, expect=seen["size"]), SCALER)
    with pytest.raises(Conflict, match="user:scaler is its writer"):
        await w.cp.intents.size("web", SizeChange(tasks=4), "user:ann")
    await w.cp.intents.size("web", SizeChange(tasks=8, take_over=True), "user:ann")
    await w.stable()
    assert counts(w) == {1: 4, 2: 4}


@scenario()
async def test_a_job_file_leaves_the_size_of_its_autoscaler_and_no_push_of_another(w: World):
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.size("web", SizeChange(tasks=6, minimum=2, maximum=8), SCALER)
    await w.cp.apply_job(a_job(3, update=FAST, command=OTHER), writer="user:ann")
    await w.stable()
    assert counts(w) == {2: 6}
    await w.cp.intents.size("web", SizeChange(tasks=20), SCALER)
    await w.stable()
    assert counts(w) == {2: 8}  # its bounds stay
    await w.cp.intents.push("web", PushChange(), DEPLOYER)
    with pytest.raises(Conflict, match="user:conveyor is its writer"):
        await w.cp.apply_job(a_job(8, update=FAST, command=THIRD), writer="user:ann")
    await w.cp.apply_job(a_job(3, update=FAST, command=OTHER), writer="user:ann")  # the same
    await w.stable()
    assert counts(w) == {2: 8}


@pytest.mark.behaviour("JC9", "CV6")
@scenario()
async def test_a_runtime_enters_with_the_next_push_and_stays_for_all_of_it(w: World):
    """Figure 7 of the article."""
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    shown = await w.cp.intents.infrastructure("web", InfrastructureChange(runtime="r2"), OPERATOR)
    assert {v.dimension: v.waits_for for v in shown.intents}["infrastructure"] == (
        "it enters with the next push"
    )
    await w.cp.intents.push("web", PushChange(share=1.0), DEPLOYER)  # the last stage
    await w.stable()
    assert {spec.runtime for spec in w.cp._jobs.get("web").specs.values()} == {""}
    shown = await w.cp.intents.push("web", push_of(0.5, command=THIRD), DEPLOYER)
    await w.stable()
    record = w.cp._jobs.get("web")
    assert {v: record.specs[v].runtime for v in counts(w)} == {2: "", 3: "r2"}
    made = task_spec(
        record.specs[3], 0, Placement(machine="m1", ports={"http": 1}), generation=1, epoch=1
    )
    assert made.environment["TWINE_RUNTIME"] == "r2"
    with pytest.raises(InvalidInput, match="operators set it"):
        await w.cp.apply_job(a_job(4, update=FAST, runtime="r9"))
    assert {v.dimension: v.waits_for for v in shown.intents}["infrastructure"] == ""


@scenario()
async def test_the_canaries_of_a_push_count_within_its_share(w: World):
    update = replace(FAST, canary=Canary(tasks=3, hold_s=60))
    await w.deployed(a_job(10, update=update))
    await w.cp.intents.push("web", push_of(0.2, update=update), DEPLOYER)
    await w.stable()
    await asyncio.sleep(120)
    assert counts(w) == {1: 8, 2: 2}
    await w.cp.intents.push("web", PushChange(share=0.5), DEPLOYER)
    await w.stable(within_s=300)
    assert counts(w) == {1: 5, 2: 5}


@scenario()
async def test_contradictory_input_is_refused(w: World):
    await w.deployed(a_job(4, update=FAST))
    with pytest.raises(Conflict, match="no earlier version"):
        await w.cp.intents.push("web", PushChange(share=0.5), DEPLOYER)
    with pytest.raises(InvalidInput, match="cannot be withdrawn, only its canary or hold"):
        await w.cp.intents.withdraw("web", "size", IntentChange(), SCALER)
    with pytest.raises(InvalidInput, match="minimum of 8 would be above its maximum of 6"):
        await w.cp.intents.size("web", SizeChange(tasks=5, minimum=8, maximum=6), SCALER)
    await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
    with pytest.raises(Conflict, match="cannot be restarted: its tasks are not all"):
        await w.cp.restart_job("web")


@pytest.mark.behaviour("BUG-UX145")
@scenario()
async def test_a_restart_under_a_hold_is_refused_because_of_the_hold(w: World):
    """The error was that its tasks are not all meant to run one version, which they were."""
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.hold("web", HoldChange(lasts_s=300), OPERATOR)
    with pytest.raises(Conflict, match="cannot be restarted: it is held"):
        await w.cp.restart_job("web")


@scenario()
async def test_bounds_are_shown_with_the_requested_size(w: World):
    await w.deployed(a_job(4, update=FAST))
    change = SizeChange(tasks=1, minimum=2, maximum=6)
    shown = await w.cp.intents.size("web", change, SCALER)
    effects = {view.dimension: view.effect for view in shown.intents}
    assert effects["size"] == "2 tasks (1 requested, at least 2, at most 6)"
    with pytest.raises(InvalidInput, match="minimum of 7 would be above its maximum of 6"):
        await w.cp.intents.size("web", SizeChange(tasks=3, minimum=7), SCALER)
    shown = await w.cp.intents.size("web", SizeChange(tasks=3), SCALER)
    assert shown.size == 3


@scenario()
async def test_ending_an_ended_intent_again_writes_nothing(w: World):
    """A canary or hold may expire at the moment in which its writer ends it."""
    await w.deployed(a_job(2, update=FAST))
    before = w.cp._jobs.get("web")
    await w.cp.intents.withdraw("web", "canary", IntentChange(), TESTER)
    assert w.cp._jobs.get("web") == before
    await w.cp.intents.hold("web", HoldChange(lasts_s=5), OPERATOR)
    await asyncio.sleep(10)
    before = w.cp._jobs.get("web").intents["hold"]
    assert before.value is None
    await w.cp.intents.withdraw("web", "hold", IntentChange(), OPERATOR)
    assert w.cp._jobs.get("web").intents["hold"] == before
    with pytest.raises(Conflict, match="and the request replaces version"):
        await w.cp.intents.withdraw("web", "hold", IntentChange(expect=1), OPERATOR)


@pytest.mark.behaviour("JC11", "JC13")
def test_a_job_of_an_earlier_release_is_adopted_as_it_is():
    """Every job has intents. None is stored until a writer writes one."""
    spec = a_job(2)
    tasks = [TaskRecord(index=i, version=3, generation=1, phase=TaskPhase.RUNNING) for i in (0, 1)]
    old = JobRecord(name="web", spec=spec, version=3, specs={3: spec}, tasks=tasks)
    assert record_of(intent_of(old), []).intents == {}
    assert wanted_tasks(old) == 2


@pytest.mark.behaviour("JC13")
@scenario()
async def test_a_job_that_is_adopted_restarts_no_task_and_has_one_writer_from_then_on(w: World):
    """Makes the writes of `twinectl job adopt`."""
    await w.deployed(a_job(4, update=FAST))
    before = {t.index: t.generation for t in w.cp._jobs.get("web").tasks}
    await w.cp.intents.push("web", PushChange(share=1.0, expect=1), "user:ann")
    await w.cp.intents.size("web", SizeChange(tasks=4, expect=1), "user:ann")
    await asyncio.sleep(60)
    assert {t.index: t.generation for t in w.cp._jobs.get("web").tasks} == before
    with pytest.raises(Conflict, match="user:ann is its writer"):
        await w.cp.apply_job(a_job(2, update=FAST, command=OTHER), writer="user:bob")


@pytest.mark.behaviour("FE8")
@scenario()
async def test_job_briefs_follow_stored_and_observed_changes(w: World):
    """An autoscaler of thousands of jobs reads in full only the jobs that changed."""
    await w.deployed(a_job(4, update=FAST))
    (first,) = (await w.cp.intents.briefs()).jobs
    assert (first.name, first.tasks, first.healthy, first.autoscale) == ("web", 4, 4, None)
    (again,) = (await w.cp.intents.briefs()).jobs
    assert again is first
    await w.cp.intents.size("web", SizeChange(tasks=3), SCALER)
    (after,) = (await w.cp.intents.briefs()).jobs
    assert (after.tasks, after.intents["size"]) == (3, first.intents["size"] + 1)
    assert after.revision > first.revision
    await w.stable()
    task = w.cp._jobs.get("web").tasks[0]
    w.region.machines[task.placement.machine].report(f"web-{task.index}", health=Health.UNHEALTHY)

    async def is_seen() -> bool:
        return [brief.healthy for brief in (await w.cp.intents.briefs()).jobs] == [2]

    await w.until(is_seen)


@pytest.mark.behaviour("JC16")
def test_a_dimension_that_is_not_known_is_kept_and_shown():

    async def main() -> None:
        world = World(a_region())
        async with world.running():
            await world.deployed(a_job(2))
            newer = StoredIntent(writer="user:x", version=4, value={"weight": 3}, expires_at=1.0)
            await world.cp._jobs.update(
                "web", lambda r: replace(r, intents=r.intents | {"traffic": newer})
            )
            await world.cp.intents.size("web", SizeChange(tasks=3), SCALER)
            await world.stable()
            assert world.cp._jobs.get("web").intents["traffic"] == newer
            shown = (await world.cp.intents.show("web")).intents[-1]
            assert (shown.dimension, shown.intent) == ("traffic", newer)
            assert "does not support" in shown.effect

    run(main())


@pytest.mark.behaviour("JC1")
def test_an_intent_outlives_the_control_plane():
    """Job control stores each writer's intent, and a new process continues from it."""

    async def main() -> None:
        w = World(a_region())
        async with w.store:
            w.cp = w.control_plane()
            async with w.cp:
                await w.deployed(a_job(6, update=FAST))
                await w.cp.intents.push("web", push_of(0.5), DEPLOYER)
                change = CanaryChange(tasks=1, command=THIRD, lasts_s=1e5)
                await w.cp.intents.canary("web", change, TESTER)
                await w.stable()
                before = {v: indexes(w, v) for v in (1, 2, 3)}
            w.cp = w.control_plane()
            async with w.cp:
                await w.stable()
                await asyncio.sleep(60)
                assert {v: indexes(w, v) for v in (1, 2, 3)} == before
                assert set(w.cp._jobs.get("web").intents) == {"push", "size", "canary"}

    run(main())


@pytest.mark.behaviour("BUG-UX61", "BUG-UX70")
@scenario()
async def test_a_plan_shows_what_its_writer_would_get(w: World):
    """After `job scale`, a plan kept the size although applying the same file changed it."""
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.size("web", SizeChange(tasks=6), SCALER)
    await w.stable()
    file = a_job(4, update=FAST)
    for writer, wanted in ((SCALER, 4), (TESTER, 6)):
        planned = await w.cp.job_planner.plan(file, writer)
        assert (planned.wanted, len(planned.stopped)) == (wanted, 6 - wanted)
        record = await w.cp._control.apply(file, dry_run=True, writer=writer)
        assert record.spec.tasks == wanted
    await w.cp.intents.push("web", push_of(1.0), DEPLOYER)
    with pytest.raises(Conflict, match="user:conveyor is its writer") as refused:
        await w.cp.job_planner.plan(file, TESTER)
    assert refused.value.hint.endswith("adopt web --take-over makes you its writer")


@pytest.mark.behaviour("BUG-UX67", "BUG-UX107", "BUG-UX95")
@scenario()
async def test_versions_that_tasks_are_to_leave_are_shown_and_a_reached_push_waits_for_nothing(
    w: World,
):
    """`job intents` omitted the version of most tasks, and reported a past rollback as a wait."""
    await w.deployed(a_job(4, update=FAST))
    await w.cp.intents.push("web", push_of(1.0), DEPLOYER)
    await w.stable()
    await w.cp.rollback_job("web")
    begun = await w.cp.intents.show("web")
    assert [(row.version, row.wanted) for row in begun.versions] == [(3, 4), (2, 0)]
    assert [v.waits_for for v in begun.intents if v.dimension == "push"] == [""]
    await w.stable()
    ended = await w.cp.intents.show("web")
    assert [(row.version, row.wanted, row.running) for row in ended.versions] == [(3, 4, 4)]
    (push,) = [view for view in ended.intents if view.dimension == "push"]
    assert push.waits_for == ""
    await w.cp.intents.size("web", SizeChange(tasks=6), SCALER)
    resized = await w.cp.intents.show("web")
    assert [(row.version, row.wanted, row.running) for row in resized.versions] == [(3, 6, 4)]
    assert [v.waits_for for v in resized.intents if v.dimension == "push"] == [""]
