"""Moves relieve hot machines of a real lab, and no request fails.

Three jobs serve pages and also compute. All are packed on the same two machines, one in each data
center, and the third machine is empty. The agents measure that, the ReBalancer plans, and the
scheduler moves a task to the third machine, which belonged to no entitlement. m3 is alone in its
data center; its tasks stay, since jobs are even over data centers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab_client import LabClient

pytestmark = [pytest.mark.long, pytest.mark.behaviour("RE1", "RE2", "RE5")]
CORES = 0.2
"""CPU that each task uses, as a share of the one core of a machine."""
STRESS = "(while :; do :; done) & exec /usr/bin/start"
"""A load next to the server: the task uses all of its CPU, whatever clients request."""
SETTINGS = """
[scheduler.rebalance]
mode = "{mode}"
every_s = 30
solve_s = 5
settle_s = 30
measure_s = 10
smooth_s = 30
hot_from = 0.5
moves_at_once = 1
"""
JOBS = ("web", "side", "third")


@pytest.fixture
def skewed(
    the_lab: LabClient, images: dict[str, str], entitlement: str, tmp_path: Path
) -> Iterator[LabClient]:
    """Yield the lab with all jobs on two machines, and the ReBalancer off."""
    lab = the_lab
    lab.usable()
    command = f'command=["/bin/sh", "-c", "{STRESS}"]'
    for name in JOBS:
        changes = ("tasks=2", 'fit="tight"', command, f"limits.cpu_max_cores={CORES}")
        lab.apply(images["v1"], *changes, f'name="{name}"', name=name)
    yield lab
    restart(lab, tmp_path, "off")
    for name in JOBS:
        lab.run("twinectl", "job", "stop", name, "--wait")


def restart(lab: LabClient, folder: Path, mode: str) -> None:
    """Start the control plane again, with the ReBalancer in a mode."""
    config = folder / f"{mode}.toml"
    config.write_text(SETTINGS.format(mode=mode))
    lab.lab("control-plane", "stop")
    lab.lab("control-plane", "start", "--config", str(config))
    lab.usable()


def places(lab: LabClient) -> Counter[str]:
    """Return the number of tasks of all jobs on each machine."""
    tasks = [task for name in JOBS for task in lab.tasks(name).values()]
    return Counter(task["placement"]["machine"] for task in tasks if task["placement"])


def test_hot_machines_are_relieved_by_moves_under_requests(
    skewed: LabClient, tmp_path: Path
) -> None:
    lab = skewed
    assert sorted(places(lab).values()) == [3, 3]
    restart(lab, tmp_path, "apply")
    before = {name: lab.tasks(name) for name in JOBS}
    traffic = lab.traffic()

    took_s = lab.until(
        "the machines of one data center share its tasks, and all are healthy",
        lambda: (
            sorted(places(lab).values()) == [1, 2, 3]
            and all(lab.job(name)["healthy"] == 2 for name in JOBS)
        ),
        timeout_s=1_800,
    )
    lab.rest(*JOBS)
    outcome = lab.outcome(traffic)

    assert outcome["failed"] == 0, outcome["failures"]
    assert outcome["requests"] > 0
    history = lab.ctl("rebalance", "history")["moves"]
    done = [move for move in history if move["state"] == "done"]
    moved = {
        f"{name}-{index}"
        for name in JOBS
        for index, task in lab.tasks(name).items()
        if task["placement"]["machine"] != before[name][index]["placement"]["machine"]
    }
    assert len(moved) >= 1
    assert moved == {f"{move['job']}-{move['task']}" for move in done}
    assert all(move["why"].startswith("cpu of ") for move in done)
    lines = lab.ctl("rebalance", "explain", done[0]["id"])["lines"]
    assert any(line.startswith("It relieves cpu of ") for line in lines)
    print(lab.run("twinectl", "rebalance", "history"), *lines, sep="\n")
    requests = outcome["requests"]
    print(f"relieved in {took_s:.0f} s by {len(done)} moves; {requests} requests, 0 failed")
