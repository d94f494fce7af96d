"""`twinectl rebalance` against a front end, with the solver in its process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from control_plane.api.rebalancing import PlaceUse, PowerUse, RebalancePlan
from control_plane.cli import main
from control_plane.cli.rebalance_picture import picture
from control_plane.client import ControlPlaneClient
from control_plane.rebalancer.core.language import toml_of
from control_plane.rebalancer.core.model import Effort
from control_plane.rebalancer.core.region_language import placement_model_of
from control_plane.rebalancer.solver import solver_process
from tests.rebalancer_models import Replay, a_model, total
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


def test_a_plan_is_drawn_and_metrics_report_the_state_of_the_rebalancer(
    ctl: Ctl, region: Region
) -> None:
    picture = ElementTree.fromstring(ok(ctl("rebalance", "plan", "-o", "svg")))
    assert "".join(picture.itertext()).strip().startswith("0 moves: hot machines 0")

    async def metrics() -> str:
        async with (
            ControlPlaneClient(f"unix:{region.socket}") as client,
            client._open().get("http://local/metrics") as answer,
        ):
            return await answer.text()

    text = asyncio.run(metrics())
    assert "twine_rebalance_gap_alarm 0.0" in text
    assert 'twine_rebalance_moves_total{state="done"} 0.0' in text


def test_a_picture_shows_each_place_and_each_budget_before_and_after() -> None:
    share = {"cpu": 0.5, "memory": 0.25, "network": 0.0}
    place = PlaceUse(
        level="msb",
        place="dc1/<msb1>",
        machines=2,
        before=share,
        after=share | {"cpu": 0.4},
        hottest_before=0.9,
        hottest_after=0.6,
    )
    power = PowerUse(place="dc1", limit_w=100.0, before_w=120.0, after_w=95.0)
    drawn = ElementTree.fromstring(picture(a_plan(places=[place], power=[power])))
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]

    assert titles == ["50.0%", "40.0%", "25.0%", "25.0%", "0.0%", "0.0%", "120.0%", "95.0%"]
    assert "msb dc1/<msb1> (2)" in [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]


def a_plan(**changes: object) -> RebalancePlan:
    values: dict[str, object] = {"number": 1, "made_at": 0.0, "took_s": 0.1, "goals": []}
    values |= {"gain": 0.0, "price": 0.0, "bound": None, "hot_before": 0, "hot_after": 0}
    values |= {"is_complete": True, "machines": 2, "tasks": 1, "movable": 1, "measured": 0}
    return RebalancePlan(**(values | {"moves": []} | changes))  # type: ignore[arg-type]


def test_operators_pause_and_resume_it_and_the_audit_log_records_it(ctl: Ctl) -> None:
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


@pytest.mark.behaviour("RE4", "BUG-UX101")
def test_a_model_is_described_written_as_toml_and_solved_without_the_region(
    ctl: Ctl, tmp_path: Path
) -> None:
    """`explain` without a move shows the data that plans use; `solve` tries a file."""
    assert "0 objects in 0 containers." in ok(ctl("rebalance", "explain"))
    file = tmp_path / "model.toml"
    file.write_text(ok(ctl("rebalance", "explain", "-o", "toml")))
    assert "0 objects in" in ok(ctl("rebalance", "explain", "--model", str(file)))
    file.write_text("\n".join(toml_of(placement_model_of(a_model(3, 4, 20)))))

    solved = ok(ctl("rebalance", "solve", str(file), "--seconds", "20"))

    assert " -> m0000" in solved
    assert "moves: goals" in solved.splitlines()[-1]
    assert all(": m" in line for line in solved.splitlines()[:-1]), "libraries print there, too"
    answer = json.loads(ok(ctl("rebalance", "solve", str(file), "-o", "json")))
    assert len(answer["moves"]) == len(solved.splitlines()) - 1
    file.write_text("")
    assert "it has no objects" in ctl("rebalance", "solve", str(file)).stderr
    file.write_text('[[object]]\nname = "o"\nat = "nowhere"\n')
    wrong = ctl("rebalance", "solve", str(file))
    assert wrong.exit_code != 0
    assert "'nowhere', which does not exist" in wrong.stderr


def test_the_process_returns_the_solution_of_the_solver() -> None:
    model = a_model(3, 12, 150)
    answer = asyncio.run(solver_process(2048)(model, Effort(seconds=60.0)))
    replay = Replay(model)

    assert answer.moves
    assert replay.carry_out(answer.moves) == []
    assert total(answer.scores, after=True) == pytest.approx(replay.cost())


def test_a_solver_without_enough_memory_fails_only_its_own_request() -> None:
    with pytest.raises(Busy, match="the solver ended with"):
        asyncio.run(solver_process(64)(a_model(3, 12, 150), Effort(seconds=5.0)))


@pytest.mark.behaviour("RE7")
def test_a_missing_solver_is_reported_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solver that cannot run does not affect the control plane."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Busy) as raised:
        asyncio.run(solver_process(64)(a_model(3, 12, 150), Effort(seconds=5.0)))
    assert "twine-cluster[rebalancer]" in raised.value.hint
