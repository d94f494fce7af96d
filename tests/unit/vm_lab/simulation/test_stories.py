"""Scenarios are read strictly. A story is text, depends only on its seed, and can be shortened."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from control_plane.api.settings import SchedulerSettings
from control_plane.roles import ControlPlane
from vm_lab.region import quiescence, scenario
from vm_lab.region.applications import CONTROLLER_KINDS
from vm_lab.region.checker import Violation
from vm_lab.region.composed import MEET_S, scenario_of_seed
from vm_lab.region.faults import _INJECTORS
from vm_lab.region.kinds import INSTANT, KINDS
from vm_lab.region.outcomes import FAULTS
from vm_lab.region.run import seeds_of
from vm_lab.region.scenario import Controller
from vm_lab.region.seed import SeedOutcome, SimulatedRegion, run_seed
from vm_lab.region.shrink import drop_events, shorten_events, shrink
from vm_lab.region.story import Fault, check_targets, draw, read, write
from wire.errors import ConfigError, InvalidInput, NotFound


@pytest.mark.parametrize("name", scenario.names())
def test_the_stories_of_a_scenario_are_those_of_its_seed(name: str) -> None:
    chosen = scenario_of_seed(scenario.load(name), 3)
    story = draw(chosen, 3)
    assert story == draw(scenario_of_seed(scenario.load(name), 3), 3)
    assert story == sorted(story, key=lambda fault: fault.at)
    assert not chosen.faults or story != draw(scenario_of_seed(scenario.load(name), 4), 4)
    assert {str(event) for event in story} >= {str(e) for e in read("\n".join(chosen.story))}
    end = chosen.minutes * 60 + 1
    if name == "composed":  # the second event of a pair comes up to MEET_S later
        assert all(fault.at <= end + MEET_S for fault in story)
    else:
        assert all(fault.at + fault.seconds <= end for fault in story)


@pytest.mark.parametrize("name", scenario.names())
def test_a_story_is_the_same_after_it_was_written_and_read(name: str) -> None:
    story = draw(scenario.load(name), 1)
    assert read(f"# a remark\n\n{write(story)}") == story


def test_an_invalid_event_line_is_reported_with_its_number() -> None:
    with pytest.raises(InvalidInput, match="line 2 is no event"):
        read("1.0s cut machine:m1 2.0s\n2.0s explode machine:m1\n")


def test_every_kind_is_explained_and_can_happen() -> None:
    assert KINDS.keys() == _INJECTORS.keys()
    assert KINDS.keys() > INSTANT


def test_the_scenarios_of_everything_and_of_updates_hold_every_kind() -> None:
    everything, controlled, updates, transfers, writers = (
        {rate.kind for rate in scenario.load(name).faults}
        for name in ("everything", "f55-controllers", "updates", "transfers", "writers")
    )
    # `controlled` has the kinds of `everything`, and TaskControllers
    assert everything < controlled
    replays = {e.kind for n in scenario.names() for e in read("\n".join(scenario.load(n).story))}
    composed = {rate.kind for rate in scenario.load("composed").faults}
    shards = {rate.kind for rate in scenario.load("shards").faults}
    roles = {rate.kind for rate in scenario.load("roles").faults}
    kinds = controlled | updates | transfers | writers | replays | composed | shards | roles
    assert kinds == KINDS.keys()
    others = kinds - (controlled | updates | transfers | writers | shards | roles)
    assert others == {"switch", "restart", "patience"}


def test_every_fault_that_a_region_can_show_has_a_scenario_named_after_it() -> None:
    shown = {name: scenario.load(name).shows for name in scenario.names()}
    assert {fault for faults in shown.values() for fault in faults} == FAULTS.keys()
    for name, faults in shown.items():
        assert not faults or name.startswith(faults[0].lower().replace("-", "") + "-")


def test_all_errors_of_a_scenario_are_reported_at_once() -> None:
    text = 'says = "x"\nminutes = -1\nwrong = 1\n[[faults]]\nkind = "cut"\nper_hour = "often"\n'
    with pytest.raises(ConfigError) as caught:
        scenario.parse(text, "mine")
    assert {error.field for error in caught.value.errors} >= {"minutes", "wrong"}
    assert set(get_args(Controller)) == set(CONTROLLER_KINDS)
    with pytest.raises(ConfigError, match=r"work\.controllers"):
        scenario.parse('says = "x"\n[work]\ncontrollers = ["quorun"]\n', "mine")
    with pytest.raises(ConfigError, match="'explode' is none of"):
        scenario.parse('says = "x"\n[[faults]]\nkind = "explode"\nper_hour = 1\n', "mine")


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NotFound, match="no scenario 'nope'") as caught:
        scenario.load("nope")
    assert "everything" in caught.value.hint


@pytest.mark.parametrize(("text", "seeds"), [("7", [7]), ("2..4", [2, 3, 4])])
def test_seeds_are_one_or_a_range(text: str, seeds: list[int]) -> None:
    assert list(seeds_of(text)) == seeds


def a_story(count: int) -> list[Fault]:
    return [Fault(float(i * 20), "cut", f"machine:m{i}", 40.0) for i in range(count)]


def test_a_story_is_shortened_to_the_events_that_matter() -> None:
    def breaks(story: list[Fault]) -> bool:
        return {"machine:m3", "machine:m11"} <= {fault.target for fault in story}

    assert [f.target for f in drop_events(a_story(20), breaks)] == ["machine:m3", "machine:m11"]


def test_remaining_events_are_shortened_and_moved_earlier_while_the_rule_breaks() -> None:
    short = shorten_events(
        a_story(3)[1:], lambda story: all(fault.seconds >= 9.0 for fault in story)
    )
    assert [fault.seconds for fault in short] == [10.0, 10.0]
    assert [fault.at for fault in short] == [1.0, 21.0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [("retry_z = 1", "settings.retry_z"), ("capacity_loss_tasks = 0.5", "settings.capacity_loss")],
)
def test_unknown_settings_of_a_scenario_are_reported(settings: str, reason: str) -> None:
    """Formerly such settings ended the run with a traceback, and so did every setting that is a
    whole number."""
    with pytest.raises(ConfigError, match=reason):
        scenario.parse(f'says = "x"\n[settings]\n{settings}\n', "mine")
    known = scenario.parse('says = "x"\n[settings]\ncapacity_loss_tasks = 3\n', "mine").settings
    assert msgspec.convert(known, SchedulerSettings).capacity_loss_tasks == 3


@pytest.mark.behaviour("BUG-LB14")
@pytest.mark.parametrize(
    "event",
    [
        *("resize job:job99", "resize machine:m00", "cut machine:nope", "cut store:main"),
        *(
            "store-full store:nope",
            "store-full job:job0",
            "role-kill role:core",
            "plane-kill job:x",
        ),
    ],
)
def test_an_event_with_a_target_that_the_region_lacks_is_refused(event: str) -> None:
    """Formerly it struck nothing or the main store, or the region ended with a `KeyError`."""
    chosen = scenario.load("everything")
    with pytest.raises(InvalidInput, match=event):
        check_targets(read(f"1.0s {event} 5.0s\n"), chosen)
    with pytest.raises(InvalidInput, match=event):
        draw(msgspec.structs.replace(chosen, story=[f"1.0s {event} 5.0s"]), 1)


@pytest.mark.behaviour("BUG-LB14")
@pytest.mark.parametrize("name", scenario.names())
def test_every_drawn_event_has_a_target_in_its_region(name: str) -> None:
    for seed in range(1, 4):
        chosen = scenario_of_seed(scenario.load(name), seed)
        story = draw(chosen, seed)
        assert check_targets(story, chosen) == story


@pytest.mark.behaviour("BUG-LB14")
def test_a_drawn_event_of_machines_may_have_a_job_as_its_target() -> None:
    """Formerly `where = ["job"]` gave the target `job:None`."""
    text = 'says = "x"\n[[faults]]\nkind = "cut"\nper_hour = 60\nwhere = ["job"]\n'
    story = draw(scenario.parse(text, "mine"), 1)
    assert story
    assert {fault.target.rstrip("0123456789") for fault in story} == {"job:job"}


@pytest.mark.behaviour("BUG-LB14")
@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[work]\ntasks = [8, 2]", "work.tasks"),
        ("[work]\ntasks = [-1, 2]", r"work.tasks"),
        ('[[faults]]\nkind = "cut"\nper_hour = 1\nseconds = [9, 3]', "faults[0].seconds"),
        ('[[faults]]\nkind = "cut"\nper_hour = 1\nseconds = [-9, 3]', "faults[0].seconds"),
        ('[[faults]]\nkind = "cut"\nper_hour = 1\nwhere = ["node"]', "faults[0].where"),
        ('[[faults]]\nkind = "cut"\nper_hour = 1\nwhere = []', "faults[0].where"),
        ('[[faults]]\nkind = "cut"\nper_hour = 1\nwhere = ["store"]', "faults[0].where"),
    ],
)
def test_bounds_and_targets_of_a_scenario_are_checked(text: str, field: str) -> None:
    """Formerly they ended in a traceback, made time go backwards, or struck nothing."""
    with pytest.raises(ConfigError) as caught:
        scenario.parse(f'says = "x"\n{text}\n', "mine")
    assert any(error.field.startswith(field) for error in caught.value.errors), caught.value


@pytest.mark.behaviour("BUG-LB14")
def test_a_deeply_nested_scenario_is_one_error() -> None:
    """Formerly it was a traceback."""
    with pytest.raises(ConfigError, match="no TOML"):
        scenario.parse(f"story = {'[' * 5000}\n", "mine")


@pytest.mark.behaviour("BUG-LB15")
def test_the_first_shorter_story_has_no_event_after_the_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formerly times since the start of the run and of the story were compared."""
    tried: list[list[Fault]] = []

    def run(_chosen: object, _seed: int, story: list[Fault]) -> SeedOutcome:
        tried.append(story)
        return outcome

    story = a_story(4)  # at 0, 20, 40 and 60 s
    outcome = SeedOutcome(
        "quiet", 1, story, [Violation("rest", 130.0, "")], "", 0, 0, 0.0, 0.0, 1, story_at=100.0
    )
    monkeypatch.setattr("vm_lab.region.shrink.run_seed", run)
    shrink(scenario.load("quiet"), 1, outcome)
    assert [fault.at for fault in tried[0]] == [0.0, 20.0]


@pytest.mark.behaviour("BUG-LB15")
def test_a_region_that_never_rests_is_not_reported_at_rest_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formerly `settle_s` was 0, which `region run` printed as the time until rest."""
    unsettled = quiescence.unsettled

    async def never(region: SimulatedRegion, control_plane: ControlPlane) -> list[str]:
        return ["never"] if region.story_at else await unsettled(region, control_plane)

    monkeypatch.setattr(quiescence, "unsettled", never)
    tables = "[shape]\nmachines = 4\n[work]\njobs = 1\n"
    chosen = scenario.parse(f'says = "x"\nminutes = 0.5\nsettle_minutes = 1\n{tables}', "mine")
    outcome = run_seed(chosen, 1, [])
    assert [v.rule for v in outcome.violations] == ["rest"]
    assert outcome.settle_s >= 60.0
