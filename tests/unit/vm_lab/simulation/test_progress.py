"""A run that takes minutes reports its progress, and its events do not change."""

from msgspec.structs import replace

from vm_lab.region import scenario
from vm_lab.region.seed import run_seed


def test_a_seed_reports_its_progress_without_changing_its_result() -> None:
    short = replace(scenario.load("hundred"), faults=[], minutes=2.0)
    reported: list[float] = []
    watched = run_seed(short, 1, on_progress=reported.append)
    assert watched.ok, watched.violations
    assert reported == sorted(reported)
    assert 120.0 <= reported[-1] <= watched.virtual_s
    assert watched.digest == run_seed(short, 1).digest
