"""A run that takes minutes says how far it is, and is the same run."""

from msgspec.structs import replace

from vm_lab.region import scenario
from vm_lab.region.seed import run_seed


def test_a_seed_tells_how_much_time_has_passed_and_is_the_same_seed() -> None:
    short = replace(scenario.load("hundred"), faults=[], minutes=2.0)
    told: list[float] = []
    watched = run_seed(short, 1, passed=told.append)
    assert watched.ok, watched.violations
    assert told == sorted(told)
    assert 120.0 <= told[-1] <= watched.virtual_s
    assert watched.digest == run_seed(short, 1).digest
