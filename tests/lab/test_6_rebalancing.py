"""RE1, RE2, RE5: hot machines of a real lab are relieved by moves, and no request fails.

Two jobs serve pages and compute beside; both are packed on the same two machines, and the third has
nothing. Agents measure that, the ReBalancer plans, and the scheduler moves one task after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.the_lab import TheLab

pytestmark = pytest.mark.long
CORES = 0.3
"""What each task computes, of the one core of a machine."""
BURN = ["/bin/sh", "-c", "(while :; do :; done) & exec /usr/bin/start"]
CONFIG = """
[scheduler.rebalance]
mode = "apply"
every_s = 30
solve_s = 5
settle_s = 30
measure_s = 10
smooth_s = 30
hot_from = 0.5
moves_at_once = 1
"""
JOBS = ("web", "side")


@pytest.fixture
def skewed(
    the_lab: TheLab, images: dict[str, str], entitlement: str, tmp_path: Path
) -> Iterator[TheLab]:
    """Yield the lab with both jobs on two machines, and the ReBalancer off."""
    lab = the_lab
    lab.usable()
    for name in JOBS:
        words = [f'"{word}"' for word in BURN]
        changes = ("tasks=2", 'fit="tight"', f"command=[{', '.join(words)}]")
        lab.apply(
            images["v1"], *changes, f'name="{name}"', f"limits.cpu_max_cores={CORES}", name=name
        )
    yield lab
    restart(lab)
    for name in JOBS:
        lab.run("twinectl", "job", "stop", name, "--wait")


def restart(lab: TheLab, *words: str) -> None:
    """Start the control plane again, with other settings."""
    lab.lab("control-plane", "stop")
    lab.lab("control-plane", "start", *words)
    lab.usable()


def places(lab: TheLab) -> list[str]:
    """Return the machine of each task of both jobs."""
    tasks = [task for name in JOBS for task in lab.tasks(name).values()]
    return sorted(task["placement"]["machine"] for task in tasks if task["placement"])


def test_hot_machines_are_relieved_by_moves_under_requests(skewed: TheLab, tmp_path: Path) -> None:
    lab = skewed
    assert sorted(map(places(lab).count, set(places(lab)))) == [2, 2]
    config = tmp_path / "control-plane.toml"
    config.write_text(CONFIG)
    restart(lab, "--config", str(config))
    before = {name: lab.tasks(name) for name in JOBS}
    traffic = lab.traffic()

    took_s = lab.until(
        "all three machines have tasks, and each is healthy",
        lambda: len(set(places(lab))) == 3 and all(lab.job(n)["healthy"] == 2 for n in JOBS),
        timeout_s=1_800,
    )
    lab.rest(*JOBS)
    outcome = lab.outcome(traffic)

    assert outcome["failed"] == 0, outcome["failures"]
    assert outcome["requests"] > 0
    history = lab.ctl("rebalance", "history")["moves"]
    done = [move for move in history if move["state"] == "done"]
    assert done, history
    moved = {
        f"{name}-{index}"
        for name in JOBS
        for index, task in lab.tasks(name).items()
        if task["placement"]["machine"] != before[name][index]["placement"]["machine"]
    }
    assert moved == {f"{move['job']}-{move['task']}" for move in done}
    assert all(move["why"].startswith("cpu of ") for move in done)
    lines = lab.ctl("rebalance", "explain", done[0]["id"])["lines"]
    assert any(line.startswith("It relieves cpu of ") for line in lines)
    print(
        f"relieved in {took_s:.0f} s by {len(done)} moves; {outcome['requests']} requests, 0 failed"
    )
