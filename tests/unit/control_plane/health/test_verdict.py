"""The verdict about silent machines: the brakes of the parts of a region."""

import pytest

from agent.api import Location
from control_plane.health.core.parts import Level, Part, Parts, Standing, seems_cut_off
from control_plane.health.core.verdict import Brakes, verdict

BRAKES = Brakes(
    share=0.4,
    delays_s={Level.RACK: 30, Level.MSB: 30, Level.DATACENTER: 300, Level.REGION: 300},
)


def region(**machines: tuple[int, int]) -> tuple[Parts, dict[str, Part]]:
    """Return MSBs `dc1_b1=(machines, lost)` and the rack of each."""
    parts, racks = Parts(), {}
    for name, (count, lost) in machines.items():
        datacenter, msb = name.split("_")
        rack = racks[name] = parts.rack(Location(datacenter=datacenter, msb=msb))
        for number in range(count):
            rack.count_change(None, Standing.LOST if number < lost else Standing.WELL)
    return parts, racks


def held(rack: Part, silent_s: float = 10) -> str:
    found = verdict(rack, silent_s, BRAKES)
    return "" if found is None else found.part


def test_one_silent_machine_is_down_at_any_share_of_a_part():
    _, racks = region(dc1_b1=(1, 1), dc2_b1=(4, 0))
    assert held(racks["dc1_b1"]) == ""


@pytest.mark.behaviour("BUG-CP16")
def test_a_rack_or_an_msb_is_held_back_for_a_short_while():
    """After the delay the control plane recovers an MSB that lost its power, without an
    operator."""
    _, racks = region(dc1_b1=(10, 10), dc1_b2=(10, 0))
    assert held(racks["dc1_b1"]) == "local/dc1/b1"
    assert held(racks["dc1_b1"], 29.9) == "local/dc1/b1"
    assert held(racks["dc1_b1"], 30) == ""


@pytest.mark.behaviour("BUG-CP16", "F-49")
def test_a_data_center_is_held_back_for_long():
    """The lost data center has a fifth of the region's machines."""
    _, racks = region(dc1_b1=(5, 5), dc1_b2=(5, 5), dc2_b1=(40, 0))
    assert held(racks["dc1_b1"], 299) == "local/dc1"
    assert held(racks["dc1_b1"], 300) == ""


def test_a_data_center_with_one_msb_has_the_delay_of_a_data_center():
    _, racks = region(dc1_b1=(5, 5), dc2_b1=(40, 0))
    assert held(racks["dc1_b1"], 31) == "local/dc1"


@pytest.mark.behaviour("F-51")
def test_losses_all_over_the_region_are_a_cut_of_our_own():
    """60 % of all machines are silent, and no part has lost all of its machines."""
    _, racks = region(dc1_b1=(10, 6), dc2_b1=(10, 6), dc3_b1=(10, 6))
    found = verdict(racks["dc2_b1"], 10, BRAKES)
    assert found is not None
    assert found.part == "local"
    assert found.left_s == 290
    assert "18 of 30 machines of region local" in found.reason
    assert "this control plane is cut off" in found.reason


def test_below_the_share_machines_are_down_one_by_one():
    _, racks = region(dc1_b1=(10, 4), dc1_b2=(10, 0))
    assert held(racks["dc1_b1"]) == ""


def test_machines_lost_long_ago_are_no_evidence_about_the_others():
    _, racks = region(dc1_b1=(10, 4), dc1_b2=(10, 0))
    rack = racks["dc1_b1"]
    for _ in range(4):
        rack.count_change(Standing.LOST, Standing.GONE)
    assert (rack.machines, rack.lost) == (6, 0)
    rack.count_change(Standing.WELL, Standing.LOST)
    assert held(rack) == ""


def test_a_part_is_forgotten_with_its_machines():
    parts, racks = region(dc1_b1=(2, 2), dc1_b2=(2, 0))
    for _ in range(2):
        racks["dc1_b2"].count_change(Standing.WELL, None)
    assert seems_cut_off(racks["dc1_b1"].path[-1], 0.4)
    assert parts.rack(Location(datacenter="dc1", msb="b1")) is racks["dc1_b1"]


@pytest.mark.parametrize(("lost", "cut"), [((10, 0), False), ((10, 4), False), ((10, 5), True)])
def test_a_lost_part_is_no_cut_of_the_region_while_the_rest_answers(lost, cut):
    _, racks = region(dc1_b1=(10, lost[0]), dc1_b2=(10, lost[1]))
    datacenter = racks["dc1_b1"].path[2]
    assert datacenter.level is Level.DATACENTER
    assert seems_cut_off(datacenter, 0.4) is cut
