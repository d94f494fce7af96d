"""The table of faults: each fault of the control plane has a scenario or a test named after it."""

import ast
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from vm_lab.region import outcomes, scenario
from vm_lab.region.checker import Violation
from vm_lab.region.cli import region
from vm_lab.region.outcomes import ELSEWHERE, FAULTS
from vm_lab.region.run import Job
from vm_lab.region.seed import SeedOutcome

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs/faults.md"
MARKED = runpy.run_path(str(TESTS.parent / "tools/behaviours"))["marked"]
ALL = [f"F-{number}" for number in range(43, 64)]


def test_each_fault_of_the_control_plane_is_shown() -> None:
    shown = {fault for name in scenario.names() for fault in scenario.load(name).shows}
    assert shown == FAULTS.keys()
    assert sorted(shown | ELSEWHERE.keys()) == ALL


@pytest.mark.parametrize("fault", sorted(ELSEWHERE))
def test_each_fault_without_a_region_scenario_has_a_test(fault: str) -> None:
    path, _, name = ELSEWHERE[fault].test.partition("::")
    assert (name, fault) in MARKED(ast.parse((TESTS / path).read_text()).body)


def test_the_page_has_a_row_for_each() -> None:
    page = PAGE.read_text()
    assert [fault for fault in ALL if f"\n| {fault} |" not in page] == []
    assert all(shown.test in page for shown in ELSEWHERE.values())


@pytest.mark.behaviour("BUG-AU6", "F-49")
@pytest.mark.parametrize("breaks", [True, False])
def test_the_command_fails_if_a_seed_broke_a_rule(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the command ended with 0 in both cases."""

    def ran(jobs: list[Job], *_: object) -> list[SeedOutcome]:
        found = [SeedOutcome(j.scenario.name, j.seed, [], [], "", 0, 0, 0.0, 0.0, 1) for j in jobs]
        if breaks:
            found[0].violations.append(Violation("one-copy", 1.0, "two copies"))
        return found

    monkeypatch.setattr(outcomes, "run_many", ran)
    done = CliRunner().invoke(region, ["faults", "--seeds", "1..2"])
    assert done.exit_code == int(breaks), done.output
    assert "| F-49 |" in done.stdout
    assert ("seed 1 broke a rule" in done.stderr) is breaks
