"""A machine is cut off: its tasks behave as their jobs request, by the records of every host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.copies import WATCH, at_most_at_once, copies
from tests.lab.lab_client import JOB, LabClient

CLOCK_READINGS = 15


def _job(tmp_path: Path, name: str, policy: str) -> Path:
    """Return the file of a job of three tasks, with its policy for cut-off machines."""
    text = JOB.read_text().replace('name = "web"\n', f'name = "{name}"\n')
    text = text.replace("tasks = 6\n", "tasks = 3\n")
    text = f'disconnect = {{ policy = "{policy}", after = "30s" }}\n{text}'
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return path


def _elsewhere(lab: LabClient, name: str, lost: str) -> bool:
    tasks = lab.tasks(name).values()
    gone = all(t["placement"] and t["placement"]["machine"] != lost for t in tasks)
    return gone and lab.job(name)["healthy"] == 3


@pytest.mark.behaviour("F-49")
@pytest.mark.long
def test_a_cut_off_machine_ends_the_tasks_that_ask_for_it_and_keeps_the_others(
    web: LabClient, images: dict[str, str], tmp_path: Path
) -> None:
    """`once` never has two copies; `twice` has two for a while, and its status reports that."""
    web.apply(images["v1"], "tasks=1")  # two machines with one CPU each take eight tasks
    for name, policy in (("once", "stop"), ("twice", "keep")):
        file = _job(tmp_path, name, policy)
        image = f"image={images['v1']}"
        web.run("twinectl", "job", "apply", str(file), "--set", image, "--wait")
    web.rest("web", "once", "twice")
    homes = {n: _homes(web, n) for n in ("once", "twice")}
    both = set(homes["once"].values()) & set(homes["twice"].values())
    assert "m3" in both, homes
    for machine in web.machines:
        web.ssh(machine, f"systemd-run --unit=watch --slice=hostcritical.slice sh -c '{WATCH}'")

    web.lab("partition", "m3")
    for name in homes:
        took = web.until(f"{name} runs elsewhere", lambda n=name: _elsewhere(web, n, "m3"))
        print(f"{name} runs elsewhere after {took:.0f} s")
    output = web.run("twinectl", "job", "status", "twice")
    assert "m3" in output, output

    web.lab("partition", "--heal", "m3")
    web.usable()
    for name in homes:
        web.until(f"{name} is stable", lambda n=name: web.job(n)["phase"] == "stable")
    web.until(
        "no task runs twice",
        lambda: len(units := [u for m in web.machines for u in web.units(m)]) == len(set(units)),
    )

    seen = {m: copies(*_watched(web, m)) for m in web.machines}
    for name, most in (("once", 1), ("twice", 2)):
        lost = [i for i, machine in homes[name].items() if machine == "m3"]
        for index in lost:
            assert at_most_at_once(seen, f"twine-task-{name}-{index}.service") == most
    for name in homes:
        web.run("twinectl", "job", "stop", name, "--wait")


def _homes(lab: LabClient, name: str) -> dict[int, Any]:
    return {i: t["placement"]["machine"] for i, t in lab.tasks(name).items()}


def _watched(lab: LabClient, machine: str) -> tuple[str, float]:
    """Return the output of a machine's watch, and how far its clock is ahead of the test's.

    The clock is read several times: the fastest answer is the most exact.
    """
    answers = []
    for _ in range(CLOCK_READINGS):
        before = time.time()
        theirs = float(lab.ssh(machine, "cut -d' ' -f1 /proc/uptime"))
        after = time.time()
        answers.append((after - before, theirs - (before + after) / 2))
    ahead_s = min(answers)[1]
    text = lab.ssh(machine, "systemctl stop watch.service; cat /run/watch; rm /run/watch")
    return text, ahead_s
