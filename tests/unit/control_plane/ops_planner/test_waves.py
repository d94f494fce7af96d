"""The waves of a plan's machines, and the next step of a wave, as pure decisions."""

from __future__ import annotations

import pytest

from control_plane.api.maintenance import (
    Ends,
    MaintenanceRequest,
    PlanRecord,
    WaveRecord,
    WaveState,
    Within,
    Work,
)
from control_plane.ops_planner.core.impact import AffectedJob, overlaps, warnings, within_budgets
from control_plane.ops_planner.core.waves import (
    ObservedMachine,
    PlannedMachine,
    advance,
    divide_into_waves,
    end_condition,
    is_power_shed,
    is_sequential,
    plan_view,
    waves_away_together,
)

NOW = 1000.0


def a_wanted(**changes) -> MaintenanceRequest:
    return MaintenanceRequest(**({"reason": "6.12.9", "work": Work.KERNEL} | changes))


def a_plan(**changes) -> PlanRecord:
    wanted = a_wanted(**changes)
    values = {"name": "k", "by": "ann", "at": 0.0, "machines": 2, "waves": 1}
    return PlanRecord(request=wanted, ends=end_condition(wanted), **values)


def a_wave(*machines: str, **changes) -> WaveRecord:
    values = {"plan": "k", "number": 1, "state": WaveState.ANNOUNCED, "start": 100.0}
    return WaveRecord(machines=list(machines), **(values | changes))


def fleet(msbs: int, racks: int, each: int) -> list[PlannedMachine]:
    return [
        PlannedMachine(f"m-{msb}-{rack}-{n}", ("dc1", f"msb{msb}", "row1", f"rack{rack}"))
        for msb in range(msbs)
        for rack in range(racks)
        for n in range(each)
    ]


@pytest.mark.behaviour("HC4")
def test_a_wave_stays_in_one_msb_and_takes_as_few_as_possible_of_each_rack():
    """A fleet's kernels are upgraded wave by wave, in one fault domain at a time."""
    waves = divide_into_waves(fleet(2, 4, 3), a_wanted(wave_size=4, within=Within.MSB))
    assert [len(wave) for wave in waves] == [4] * 6
    assert all(len({name.split("-")[1] for name in wave}) == 1 for wave in waves)
    assert all(len({name.split("-")[2] for name in wave}) == 4 for wave in waves)
    assert sorted(name for wave in waves for name in wave) == sorted(
        machine.machine for machine in fleet(2, 4, 3)
    )


def test_without_a_wanted_for_waves_all_machines_go_at_once():
    wanted = a_wanted()
    assert [len(wave) for wave in divide_into_waves(fleet(2, 10, 60), wanted)] == [1000, 200]
    assert not is_sequential(wanted)


@pytest.mark.behaviour("HC13")
def test_the_lowest_priority_leaves_first_when_power_is_short():
    """The first wave has the machines whose tasks have the lowest priority."""
    machines = [
        PlannedMachine(f"m{priority}-{n}", ("dc1", "msb1", "row1", f"r{n}"), priority)
        for priority in (900, 100, 500)
        for n in range(2)
    ]
    waves = divide_into_waves(machines, a_wanted(work=Work.POWER_CAP))
    assert waves == [["m100-0", "m100-1"], ["m500-0", "m500-1"], ["m900-0", "m900-1"]]


def test_no_more_is_shed_than_requested():
    plan = a_plan(work=Work.POWER_CAP, shed_w=1000)
    waves = [a_wave("m1", "m2"), a_wave("m3", number=2, state=WaveState.WAITING)]
    hosts = {name: ObservedMachine(True, True, tasks=0, power_w=500) for name in ("m1", "m2", "m3")}
    assert is_power_shed(plan, waves, hosts)
    hosts["m2"] = ObservedMachine(True, True, tasks=1, power_w=500)
    assert not is_power_shed(plan, waves, hosts)


@pytest.mark.behaviour("HC7")
@pytest.mark.parametrize(
    ("wanted", "ends"),
    [
        ({"work": Work.KERNEL}, Ends.REBOOT),
        ({"work": Work.FIRMWARE}, Ends.REBOOT),
        ({"work": Work.REFRESH}, Ends.EMPTY),
        ({"work": Work.POWER_DEVICE, "deadline_s": 600.0, "duration_s": 60.0}, Ends.REPORTED),
        (
            {"work": Work.SWITCH, "deadline_s": 60.0, "duration_s": 60.0, "tasks_survive": True},
            Ends.TIME,
        ),
        ({"work": Work.KERNEL, "ends": Ends.REPORTED}, Ends.REPORTED),
    ],
)
def test_how_it_is_known_that_work_is_over(wanted, ends):
    """Each kind of work in the paper has its own end."""
    assert end_condition(a_wanted(**wanted)) is ends


def test_work_on_a_machine_is_over_once_it_booted_again_and_answers():
    plan = a_plan(deadline_s=600.0, duration_s=600.0)
    wave = a_wave("m1", "m2", boots={"m1": "old", "m2": "old"})
    hosts = {
        "m1": ObservedMachine(True, True, boot="new"),
        "m2": ObservedMachine(True, True, boot="old"),
    }
    then = advance(plan, wave, hosts, NOW)
    assert (then.close, then.finish, then.waits) == (("m1",), False, "")
    hosts["m2"] = ObservedMachine(
        True, False, boot="new"
    )  # m2 is up, but its profile is not verified yet
    assert advance(plan, wave, hosts, NOW).close == ("m1",)
    hosts = {name: ObservedMachine(False, True, boot="new") for name in ("m1", "m2")}
    assert advance(plan, wave, hosts, NOW).finish


def test_a_wave_whose_machines_do_not_return_stops_those_that_follow():
    plan = a_plan(deadline_s=600.0, duration_s=600.0, return_within_s=300.0)
    wave = a_wave("m1", "m2", boots={"m1": "old", "m2": "old"})
    hosts = {"m1": ObservedMachine(False, True), "m2": ObservedMachine(True, False, boot="old")}
    assert advance(plan, wave, hosts, 1599.0).waits == ""
    then = advance(plan, wave, hosts, 1600.0)
    assert then.waits == "wave 1: 1 of 2 machines are not back: m2"
    assert not then.finish
    left = a_wave("m1", "m2", left_out=["m2"])
    assert advance(plan, left, hosts, 1600.0).finish


def test_a_removed_machine_blocks_nothing():
    assert advance(a_plan(), a_wave("gone"), {}, NOW).finish


# -- consequences of a plan


def a_job(name: str, budget: int, down: int = 0, **changes) -> AffectedJob:
    return AffectedJob(name, "front", 10, down, budget, **changes)


@pytest.mark.behaviour("HC6")
def test_49_of_50():
    """One replica is down, so the machine of the other replica waits."""
    machines = [f"m{n}" for n in range(50)]
    jobs = {f"j{n}": a_job(f"j{n}", 1) for n in range(50)} | {"j7": a_job("j7", 1, down=1)}
    on = {machine: {f"j{n}": 1} for n, machine in enumerate(machines)}
    at_once, held = within_budgets(machines, on, jobs)
    assert at_once == 49
    assert [(one.machine, one.jobs) for one in held] == [("m7", ["j7"])]


def test_two_tasks_of_one_job_do_not_go_at_once():
    jobs = {"web": a_job("web", 1)}
    at_once, held = within_budgets(["m1", "m2"], {"m1": {"web": 1}, "m2": {"web": 1}}, jobs)
    assert at_once == 1
    assert [one.machine for one in held] == ["m2"]


def test_a_job_is_judged_by_the_wave_that_takes_most_of_it():
    job = a_job("web", 2, tasks_by_wave=[{0, 1, 2}, {3}], not_serving={2})
    impact = job.impact(stay=False)
    assert (impact.there, impact.most_in_a_wave, impact.rounds) == (4, 2, 1)
    assert not impact.stay
    assert a_job("db", 1, controller="db", tasks_by_wave=[{0}]).impact(stay=True).stay


def test_a_plan_is_refused_for_lack_of_room_or_for_its_size():
    unplaced = a_job(
        "web", 1, tasks_by_wave=[{0, 1}], unplaced=2, reasons=["2 machines: no memory"]
    )
    impacts = [unplaced.impact(stay=False)]
    found = warnings(impacts, 0.1, has_deadline=True, tasks_survive=False)
    assert found == [
        "job web: 2 of 2 tasks have no other machine, they stop at the deadline:"
        " 2 machines: no memory"
    ]
    assert warnings(impacts, 0.1, has_deadline=True, tasks_survive=True) == []
    assert warnings([], 0.4, has_deadline=True, tasks_survive=False) == [
        "a wave takes 40% of the region's machines at once"
    ]


def test_other_work_on_the_same_machines_and_jobs_is_reported():
    assert overlaps({"plan k": ["m2", "m1"]}, {"plan s": ["web"]}) == [
        "plan k: it also has 2 of these machines (m1, m2); tasks leave once, by the earlier"
        " deadline",
        "plan s: takes machines of the same jobs: web; one budget is for both",
    ]


def test_a_wave_without_a_deadline_waits_as_long_as_announced():
    plan = a_plan(duration_s=600.0, return_within_s=300.0)
    wave = a_wave("m1", boots={"m1": "old"})
    hosts = {"m1": ObservedMachine(True, False, boot="old")}
    assert advance(plan, wave, hosts, 999.5).waits == ""
    assert advance(plan, wave, hosts, 1000.0).waits.startswith("wave 1: 1 of 1 machines")


@pytest.mark.parametrize(
    ("wanted", "together"),
    [
        ({"wave_size": 1, "deadline_s": 60.0, "duration_s": 60.0}, [[0], [1], [2]]),
        ({"wave_size": 1, "work": Work.POWER_CAP}, [[0, 1, 2]]),
        ({"deadline_s": 60.0, "duration_s": 60.0}, [[0, 1, 2]]),
    ],
)
def test_waves_with_returning_machines_need_room_for_one_machine_at_a_time(wanted, together):
    assert waves_away_together(a_wanted(**wanted), 3) == together


@pytest.mark.parametrize(("count", "ending"), [(5, "m4"), (6, "m4 and 1 more")])
def test_five_machines_of_another_plan_are_named_and_the_others_counted(count, ending):
    [message] = overlaps({"plan b": [f"m{n}" for n in range(count)]}, {})
    assert f"m0, m1, m2, m3, {ending});" in message


def test_a_wave_cancelled_before_its_begin_has_no_start():
    waves = [
        a_wave("m1", state=WaveState.WAITING, start=0.0),
        a_wave("m2", state=WaveState.CANCELLED, start=0.0),
        a_wave("m3", state=WaveState.CANCELLED, start=100.0),
    ]
    shown = plan_view(a_plan(), waves, {}, NOW)
    assert [wave.start for wave in shown.waves] == [None, None, 100.0]
