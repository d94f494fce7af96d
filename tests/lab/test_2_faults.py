"""Tasks run on when any component dies; a task that has to move moves once."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter

import pytest

from tests.lab.lab_client import LabClient


@pytest.mark.behaviour("AG5", "F-02")
def test_six_sigkills_of_the_agent_restart_no_task(web: LabClient) -> None:
    before = web.invocations()
    for _ in range(6):
        web.ssh("m1", "systemctl kill -s KILL twine-agent.service")
        web.until(
            "the agent is back",
            lambda: (
                "m1"
                in web.ssh(
                    "m1", "curl -sf --unix-socket /run/twine/agent.sock http://x/readyz && hostname"
                )
            ),
        )
    web.rest()
    assert web.invocations() == before


@pytest.mark.behaviour("F-03", "AG4")
def test_a_task_that_ends_while_the_agent_is_down_is_reported(web: LabClient) -> None:
    image = web.job()["record"]["spec"]["image"]
    script = "trap 'exit 7' TERM; echo trapped; while :; do sleep 0.2; done"
    web.ssh(
        "m2",
        f"twine-agent run once --image {image} --restart never --no-wait --memory 16M -- "
        f"/bin/sh -c {shlex.quote(script)}",
    )
    unit = "twine-task-once.service"
    web.until("it runs", lambda: "trapped" in web.ssh("m2", "twine-agent logs once"))
    web.ssh("m2", f"systemctl stop twine-agent.service; systemctl kill --kill-whom=main {unit}")
    web.until("it ended", lambda: unit not in web.units("m2"))
    web.ssh("m2", "systemctl start twine-agent.service")

    def ended() -> bool:
        tasks = json.loads(web.ssh("m2", "twine-agent ps -o json"))["tasks"]
        return [
            (t["state"], (t["last_exit"] or {}).get("code"))
            for t in tasks
            if t["task_id"] == "once"
        ] == [("stopped", 7)]

    web.until("its exit code is known", ended)
    web.remove("m2", "once")


@pytest.mark.behaviour("AG5", "AV3")
def test_a_minute_without_the_control_plane_restarts_no_task(web: LabClient) -> None:
    before = web.invocations()
    web.lab("control-plane", "stop")
    time.sleep(60)
    assert json.loads(web.ssh("m1", "twine-agent ps -o json"))["tasks"]
    web.lab("control-plane", "start")
    web.rest()
    assert web.invocations() == before


@pytest.mark.behaviour("SC3", "SC10")
def test_tasks_of_a_dead_machine_run_elsewhere_and_never_twice(web: LabClient) -> None:
    lost = [f"web-{i}" for i, t in web.tasks().items() if t["placement"]["machine"] == "m3"]
    assert lost
    web.lab("power-off", "m3")

    def moved() -> bool:
        tasks = web.tasks()
        return web.job()["healthy"] == 6 and all(
            t["placement"]["machine"] != "m3" for t in tasks.values()
        )

    took_s = web.until("all six are healthy on two machines", moved)
    print(f"moved after {took_s:.0f} s")
    elsewhere = {m: web.units(m) for m in ("m1", "m2")}
    assert sum(len(u) for u in elsewhere.values()) == 6

    web.lab("power-on", "m3")
    web.rest()  # tasks move back until each machine has the same number
    running = [u for m in web.machines for u in web.units(m)]
    assert len(running) == len(set(running)) == 6


def test_a_rebooted_machine_takes_tasks_again(web: LabClient) -> None:
    boot = web.ssh("m2", "cat /proc/sys/kernel/random/boot_id")
    web.ssh("m2", "systemctl --no-block reboot")
    web.until(
        "m2 booted again",
        lambda: web.ssh("m2", "cat /proc/sys/kernel/random/boot_id") != boot,
    )
    web.spread(web.job()["record"]["spec"]["image"], 6)
    running = {m: web.units(m) for m in web.machines}
    assert {m: len(units) for m, units in running.items()} == {"m1": 2, "m2": 2, "m3": 2}
    assert len({unit for units in running.values() for unit in units}) == 6


@pytest.mark.behaviour("RB3", "RB11", "HC14")
def test_a_machine_is_drained_without_a_failed_request(web: LabClient) -> None:
    # RB3 RB11 HC14: planned maintenance, within the job's availability budget
    per_machine = Counter(t["placement"]["machine"] for t in web.tasks().values())
    assert per_machine == {"m1": 2, "m2": 2, "m3": 2}

    traffic = web.traffic()
    web.run("twinectl", "machine", "drain", "m3", "--reason", "new memory", "--deadline", "30m")
    took = web.until(
        "m3 is empty and the job is whole",
        lambda: web.job()["healthy"] == 6 and web.units("m3") == [],
    )
    outcome = web.outcome(traffic)
    print(f"drained in {took:.0f} s", outcome)
    assert outcome["failed"] == 0, outcome
    assert "m3" not in {t["placement"]["machine"] for t in web.tasks().values()}
    shown = web.run("twinectl", "machine", "show", "m3")
    assert "new memory" in shown, shown

    web.run("twinectl", "machine", "undrain", "m3")
    assert "new memory" not in web.run("twinectl", "machine", "list", "--unavailable")
