"""`twine-lab region run`: its options, and what it does with wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vm_lab.region import cli
from vm_lab.region.cli import region
from vm_lab.region.run import Job
from vm_lab.region.seed import SeedOutcome

FIGURES = ("calls to agents", "transactions", "largest value", "largest transaction")


def outcome_of(seed: int) -> SeedOutcome:
    figures = dict.fromkeys(FIGURES, 0)
    return SeedOutcome("quiet", seed, [], [], "", 0, 0, 0.0, 0.0, 1, figures)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Seeds that ran; none of them takes any time."""
    seeds: list[int] = []

    def run_seed(_: object, seed: int, *_arguments: Any, **_options: Any) -> SeedOutcome:
        seeds.append(seed)
        return outcome_of(seed)

    def run_many(jobs: list[Job], *_: object) -> list[SeedOutcome]:
        return [run_seed(job.scenario, job.seed) for job in jobs]

    monkeypatch.setattr(cli, "run_seed", run_seed)
    monkeypatch.setattr(cli, "run_many", run_many)
    return seeds


def run(*words: str) -> Result:
    return CliRunner().invoke(region, ["run", "quiet", *words])


@pytest.mark.behaviour("BUG-LB13")
@pytest.mark.parametrize(
    ("words", "seeds"),
    [((), [1]), (("--seed", "0"), [0]), (("--seed", "7"), [7]), (("--seeds", "0..2"), [0, 1, 2])],
)
def test_the_given_seeds_run(ran: list[int], words: tuple[str, ...], seeds: list[int]) -> None:
    """Formerly `--seed 0` ran seed 1."""
    assert run(*words).exit_code == 0
    assert ran == seeds


@pytest.mark.behaviour("BUG-LB13")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--seeds", "9..3"), "3 is less than 9"),
        (("--seed", "1", "--seeds", "1..3"), "exclude each other"),
        (("--seeds", "1..3", "--story", "story"), "a story runs with one seed"),
        (("--story", "latin"), "cannot read the story latin"),
        (("--csv", "missing/a.csv"), "there is no folder missing"),
        (("--svg", "missing/a.svg"), "there is no folder missing"),
    ],
)
def test_wrong_options_are_one_error_before_any_seed_runs(
    ran: list[int],
    words: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formerly they were ignored, or a traceback, for a missing folder only after the run."""
    monkeypatch.chdir(tmp_path)
    Path("story").write_text("1.0s release job:job0\n")
    Path("latin").write_bytes(b"# \xfc\n")
    result = run(*words)
    assert result.exit_code == 64
    assert reason in result.stderr
    assert ran == []


@pytest.mark.behaviour("BUG-LB13")
def test_the_outcome_is_printed_even_if_a_file_cannot_be_written(
    ran: list[int], tmp_path: Path
) -> None:
    """Formerly the results of all seeds were lost."""
    result = run("--csv", str(tmp_path))
    assert result.exit_code != 0
    assert "1 seed, 0 broke a rule" in result.stdout


@pytest.mark.behaviour("BUG-LB13")
def test_a_table_without_seeds_is_one_error() -> None:
    result = CliRunner().invoke(region, ["faults", "--seeds", "3..1"])
    assert result.exit_code == 64
    assert "1 is less than 3" in result.stderr
