"""Operations on whole machines and jobs, on real machines, while clients call the job.

The clients follow discovery, one of them through HAProxy. The tests wait for conditions: a slow
host makes them slower but does not fail them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab_client import JOB, NAME, REST_S, LabClient
from tests.lab.test_4_etcd import in_the_lab

pytestmark = [pytest.mark.lab, pytest.mark.long]
CONTROLLER = "10.77.0.3"
PATIENT = Path(__file__).with_name("patient_controller.py")
AGAIN = (
    "kexec -l /boot/vmlinuz-$(uname -r) --initrd=/boot/initrd.img-$(uname -r) --reuse-cmdline"
    " && (nohup systemctl kexec >/dev/null 2>&1 &)"
)
"""The same kernel again: the test shows the procedure, not the version."""
CANARY = """
on_failure = "rollback"

[update.canary]
tasks = 1
hold_s = "10s"
"""
PROFILE = """
description = "A queue of an owner's choice"
extends = "web"
owner = "web"

[sysctl]
"net.core.somaxconn" = {length}
"""


@contextmanager
def clients(lab: LabClient) -> Iterator[list[dict[str, Any]]]:
    """Run clients of the job meanwhile; afterwards the list holds their results."""
    found: list[dict[str, Any]] = []
    running: list[subprocess.Popen[bytes]] = [lab.traffic(), lab.traffic(lab.proxy())]
    try:
        yield found
    finally:
        for one in running:
            found.append(lab.outcome(one))
            print({k: v for k, v in found[-1].items() if k not in ("lists", "asked")})
            for at, task in found[-1]["failed_at"]:
                print(f"around the failed request to {task}:", *around(lab, at), sep="\n  ")
        lab.lab("proxy", "stop")


def around(lab: LabClient, at: float) -> list[str]:
    """Return the operations on the job in the minute before and after a moment, with times."""
    events = lab.ctl("job", "events", "web")["events"]
    return [
        f"{e.get('start', 0.0) - at:+.1f} s to {(e.get('end') or 0.0) - at:+.1f} s: {e}"
        for e in events
        if e.get("start", 0.0) - 60 < at < (e.get("end") or at) + 60
    ]


def called_unlisted(outcome: dict[str, Any]) -> list[tuple[float, str]]:
    """Return requests that a client sent to tasks that discovery had already disabled."""
    lists_received = outcome["lists"]
    times = [at for at, _ in lists_received]
    return [
        (at, task)
        for at, task in outcome["asked"]
        if task not in lists_received[bisect_right(times, at) - 1][1]
    ]


def applied(lab: LabClient, file: Path, image: str) -> None:
    words = ("--set", f"image={image}", "--wait", "--timeout", f"{REST_S:g}s")
    lab.run("twinectl", "job", "apply", str(file), *words, timeout_s=2 * REST_S)


def rollouts(lab: LabClient) -> list[str]:
    events = lab.ctl("job", "events", "web")["events"]
    return [e["reason"] for e in events if e["kind"] == "rollout"]


def boots(lab: LabClient) -> dict[str, str]:
    return {m: lab.ssh(m, "cat /proc/sys/kernel/random/boot_id") for m in lab.machines}


@pytest.mark.behaviour("HC5", "HC7")
def test_a_kernel_upgrade_of_three_machines_in_waves_fails_no_request(web: LabClient) -> None:
    """Each machine is drained, booted by kexec, verified and returned before the next one."""
    before, requested, order = boots(web), set[str](), list[str]()
    words = ("--work", "kernel", "--reason", "the same once more", "--wave-size", "1")
    times = ("--deadline", "3h", "--duration", "1h", "--despite")
    with clients(web) as outcomes:
        web.run("twinectl", "maintenance", "apply", "again", *web.machines, *words, *times)

        def is_done() -> bool:
            """Act as the operator: boot the machines that the plan lists as ready, and report
            nothing.
            """
            shown = web.ctl("maintenance", "show", "again")
            ready = [m for wave in shown["waves"] for m in wave.get("ready", [])]
            assert len(ready) <= 1
            for machine in set(ready) - requested:
                assert web.units(machine) == []
                assert order == [] or is_back(order[-1])
                web.ssh(machine, AGAIN)
                requested.add(machine)
                order.append(machine)
            return bool(shown["plan"]["state"] == "done")

        def is_back(machine: str) -> bool:
            record = web.ctl("machine", "show", machine)["record"]
            events = record["unavailability"]
            return bool(record["state"] == "up" and all(e["end"] is not None for e in events))

        web.until("all machines run the kernel", is_done, 3 * REST_S)
    assert sorted(order) == sorted(web.machines)
    after = boots(web)
    assert not set(after.values()) & set(before.values())
    assert called_unlisted(outcomes[0]) == []
    for outcome in outcomes:
        assert outcome["failed"] == 0, outcome["failures"]
        assert outcome["requests"] > 50
    web.rest()


@pytest.mark.behaviour("SC3", "HC11", "SD1", "TC15")
def test_a_failed_machine_is_reported_in_order_and_its_tasks_get_no_requests(
    web: LabClient, tmp_path: Path
) -> None:
    """Order: event, unlisted, controller called, started elsewhere after its acknowledgement,
    listed.
    """
    image = web.job()["record"]["spec"]["image"]
    web.lab("exec", "--", "ip", "address", "replace", f"{CONTROLLER}/24", "dev", "br-lab")
    credential, go, log = tmp_path / "credential.json", tmp_path / "go", tmp_path / "log"
    state = f"/var/lib/twine-lab/{NAME}/control-plane"
    add = ("controller", "add", "patient", "--host", CONTROLLER, "--out", str(credential))
    web.run("twine-control-plane", *add, "--state", state)
    controller_config = f'\n[controller]\nurl = "https://{CONTROLLER}:7451"\nname = "patient"\n'
    file = tmp_path / "web.toml"
    file.write_text(JOB.read_text() + controller_config + 'failure_wait_s = "10h"\n')

    def calls() -> list[dict[str, Any]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines]

    run = (sys.executable, str(PATIENT), str(credential), CONTROLLER, str(go), str(log))
    with in_the_lab(*run):
        applied(web, file, image)
        lost = {f"web-{i}" for i, t in web.tasks().items() if t["placement"]["machine"] == "m3"}
        indexes = sorted(int(task.rpartition("-")[2]) for task in lost)
        with clients(web) as outcomes:
            web.lab("power-off", "m3")

            def is_called() -> bool:
                moves = [sorted(t for t, _, cause in c["asked"] if cause == "failure")
                         for c in calls()]  # fmt: skip
                return moves.count(indexes) >= 3  # called, and called again

            web.until("the controller is called for all of them", is_called)
            now = web.tasks()
            assert all(now[i]["placement"]["machine"] == "m3" for i in indexes)
            assert {u for m in ("m1", "m2") for u in web.units(m)}.isdisjoint(
                f"twine-task-{task}.service" for task in lost
            )
            listed = {e["task"] for e in web.ctl("job", "endpoints", "web")["endpoints"]}
            assert listed == {f"web-{i}" for i in now} - lost
            go.touch()
            web.until("all six are healthy again", lambda: web.job()["healthy"] == 6)
        events = web.ctl("machine", "show", "m3")["record"]["unavailability"]
        down = max(e["start"] for e in events if e["kind"] == "failure")
        web.lab("power-on", "m3")
        web.usable()
        applied(web, JOB, image)

    called_at = next(c["at"] for c in calls() if c["asked"])
    first = next(c for c in calls() if c["asked"])
    assert set(indexes) <= set(first["unhealthy"])
    acknowledged_at = next(c["at"] for c in calls() if c["acknowledged"])
    direct, proxied = outcomes
    unlisted_at = next(at for at, tasks in direct["lists"] if lost.isdisjoint(tasks))
    whole_at = next(at for at, tasks in direct["lists"] if at > unlisted_at and len(tasks) == 6)
    assert down < min(unlisted_at, called_at)
    assert max(unlisted_at, called_at) < acknowledged_at < whole_at
    story = web.ctl("task", "events", f"web-{indexes[0]}")["events"]
    move = next(e for e in reversed(story) if e.get("cause") == "failure")
    assert move["approved"].startswith("patient ")
    # Requests running on the machine, and those from before its silence was long enough, cannot be
    # saved. Once the clients were notified, they send it no request, and none fails.
    assert called_unlisted(direct) == []
    assert [(at, task) for at, task in direct["failed_at"] if task not in lost] == []
    assert [at for at, _ in direct["failed_at"] if at > unlisted_at] == []
    assert [at for at, _ in proxied["failed_at"] if at > acknowledged_at] == []
    for outcome in outcomes:
        assert outcome["requests"] > 50
        assert outcome["failed"] == len(outcome["failed_at"])
        assert len(outcome["asked"]) == outcome["requests"]
    assert len(
        {task for at, task in direct["asked"] if unlisted_at < at < acknowledged_at}
    ) == 6 - len(lost)


@pytest.mark.behaviour("SC15", "SC2")
def test_a_failed_canary_rolls_back_and_a_healthy_one_continues(
    web: LabClient, images: dict[str, str], tmp_path: Path
) -> None:
    """No request fails."""
    image = web.job()["record"]["spec"]["image"]
    text = JOB.read_text() + CANARY
    bad, good = tmp_path / "bad.toml", tmp_path / "good.toml"
    good.write_text(text)
    bad.write_text(text.replace('["/usr/bin/start"]', '["/bin/sh", "-c", "exit 1"]'))
    before, rollout_count = web.invocations(), len(rollouts(web))
    with clients(web) as outcomes:
        words = ("--set", f"image={image}")
        web.run("twinectl", "job", "apply", str(bad), *words)
        web.until("it went back", lambda: len(rollouts(web)) > rollout_count)
        assert rollouts(web)[rollout_count].startswith("rolled back to version ")
        web.rest()
        kept = {t for t, unit in web.invocations().items() if before.get(t) == unit}
        assert len({t for t in kept if t.startswith("web-")}) == 5  # all but the canary
        rollout_count = len(rollouts(web))
        applied(web, good, images["v2"])
        web.until("it is reported", lambda: len(rollouts(web)) > rollout_count + 1)
        assert "1 canaries" in rollouts(web)[rollout_count]
        assert rollouts(web)[rollout_count + 1].startswith("all tasks run version ")
    assert called_unlisted(outcomes[0]) == []
    for outcome in outcomes:
        assert outcome["failed"] == 0, outcome["failures"]
        assert set(outcome["answers"]) == {"Twine demo v1", "Twine demo v2"}
    applied(web, JOB, images["v2"])


@pytest.mark.behaviour("HP12", "SC2")
def test_an_owners_profile_is_rolled_out_by_machine_under_running_tasks(
    web: LabClient, tmp_path: Path
) -> None:
    """The guests' settings are read; no task restarts for the change, in either direction."""

    def lengths() -> set[str]:
        return {web.ssh(m, "cat /proc/sys/net/core/somaxconn").strip() for m in web.machines}

    def state() -> str:
        return str(web.ctl("profile", "status", "demo")["rollout"]["state"])

    before, units = lengths(), web.invocations()
    file = tmp_path / "queue.toml"
    file.write_text(PROFILE.format(length=7321))
    with clients(web) as outcomes:
        words = ("demo", str(file), "--reason", "bursts", "--gate", "5s")
        web.run("twinectl", "profile", "propose", *words)
        web.until("all machines run it", lambda: state() == "done")
        assert lengths() == {"7321"}
        web.run("twinectl", "profile", "rollback", "demo")
        web.until("all are back", lambda: lengths() == before)
        web.until("that is reported", lambda: state() == "returned")
        web.rest()
    assert web.invocations() == units
    assert called_unlisted(outcomes[0]) == []
    for outcome in outcomes:
        assert outcome["failed"] == 0, outcome["failures"]
