"""`twinectl rebalance` against a front end, with the solver in its process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control_plane.cli import main
from control_plane.rebalancer.core.model import Effort, total
from control_plane.rebalancer.solver import solver_process
from tests.rebalancer_models import Replay, a_model
from wire.errors import Busy

from .conftest import Region

Ctl = Callable[..., Result]
HEAD = "machine,region,datacenter,msb,row,rack,machine_type"


@pytest.fixture
def ctl(region: Region, tmp_path: Path) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}", "TZ": "UTC"}
        )

    path = tmp_path / "machines.csv"
    path.write_text(f"{HEAD}\nm1,prn,prn1,msb1,row1,rack1,web\n")
    assert run("machine", "import", str(path), "--simulated").exit_code == 0
    return run


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_plan_is_made_and_shown_although_the_rebalancer_is_off(ctl: Ctl) -> None:
    text = ok(ctl("rebalance", "plan"))
    assert "0 moves gain 0.000" in text
    assert json.loads(ok(ctl("rebalance", "plan", "-o", "json")))["moves"] == []


def test_operators_pause_and_resume_it_and_the_audit_log_says_so(ctl: Ctl) -> None:
    assert "mode off: plans only when asked" in ok(ctl("rebalance", "status"))
    assert "paused by" in ok(ctl("rebalance", "pause", "--reason", "a launch"))
    assert "a launch" in ok(ctl("rebalance", "status"))
    assert "plans only when asked" in ok(ctl("rebalance", "resume"))
    audit = ok(ctl("audit"))
    assert "pause_rebalance" in audit
    assert "resume_rebalance" in audit


def test_history_is_empty_and_an_unknown_move_is_not_found(ctl: Ctl) -> None:
    ok(ctl("rebalance", "history"))
    unknown = ctl("rebalance", "explain", "p1.1")
    assert unknown.exit_code == 3
    assert "there is no move 'p1.1'" in unknown.stderr


def test_the_process_answers_what_the_solver_finds() -> None:
    model = a_model(3, 12, 150)
    answer = asyncio.run(solver_process(2048)(model, Effort(seconds=5.0)))
    replay = Replay(model)

    assert answer.steps
    assert replay.carry_out(answer.steps) == []
    assert total(answer.scores, after=True) == pytest.approx(replay.cost())


def test_a_solver_that_has_too_little_memory_fails_alone() -> None:
    with pytest.raises(Busy, match="the solver ended with"):
        asyncio.run(solver_process(64)(a_model(3, 12, 150), Effort(seconds=5.0)))


def test_a_missing_solver_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """RE7: the control plane is not harmed by a solver that cannot run."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Busy) as raised:
        asyncio.run(solver_process(64)(a_model(3, 12, 150), Effort(seconds=5.0)))
    assert "twine-cluster[rebalancer]" in raised.value.hint
