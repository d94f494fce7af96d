"""Each step of a machine towards its profile."""

import pytest
from inventory import some_facts
from msgspec.structs import replace

from agent.api import Location, ProfileState, ProfileStatus
from control_plane.api.machines import MachineRecord
from control_plane.profiles.core.switch import Step, next_step

FACTS = some_facts("m1", boot_id="b")
RECORD = MachineRecord(
    machine="m1",
    location=Location(),
    machine_type="small",
    address="a:1",
    facts=FACTS,
    entitlement="front",
    assignment_generation=3,
    profile_wanted="web",
)


@pytest.mark.behaviour("HP15", "HP12")
@pytest.mark.parametrize(
    ("name", "generation", "state", "empty", "step"),
    [
        ("", 0, ProfileState.NONE, True, Step.SEND),
        ("old", 2, ProfileState.VERIFIED, True, Step.SEND),
        ("web", 2, ProfileState.VERIFIED, True, Step.SEND),  # another assignment's proof
        ("web", 3, ProfileState.APPLYING, True, Step.WAIT),
        ("web", 3, ProfileState.VERIFIED, True, Step.RECORD),
        ("web", 3, ProfileState.PENDING_REBOOT, True, Step.WAIT_REBOOT),
        ("web", 3, ProfileState.PENDING_REBOOT, False, Step.WAIT),
        ("web", 3, ProfileState.DRIFTED, True, Step.RAISE),
        ("web", 3, ProfileState.DEGRADED, True, Step.QUARANTINE),
        ("web", 3, ProfileState.NONE, True, Step.SEND),
        ("web", 9, ProfileState.VERIFIED, True, Step.RAISE),
    ],
)
def test_the_next_step_of_a_switch_follows_from_its_state(name, generation, state, empty, step):
    seen = ProfileStatus(name=name, generation=generation, state=state)
    assert next_step(RECORD, seen, empty=empty).step is step


def test_nothing_is_left_to_do_once_the_proof_is_recorded():
    seen = ProfileStatus(name="web", generation=3, state=ProfileState.VERIFIED)
    record = replace(RECORD, profile="web", profile_state=ProfileState.VERIFIED)
    assert next_step(record, seen, empty=True).step is Step.NOTHING
    assert next_step(replace(RECORD, entitlement=""), seen, empty=True).step is Step.NOTHING
