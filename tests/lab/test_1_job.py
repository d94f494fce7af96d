"""A job on three real machines: deploy, resize, update, refuse."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.lab.lab_client import JOB, Failed, LabClient


@pytest.mark.behaviour("AG1", "AG2", "AG3", "AL8", "RB2", "SD3")
def test_six_tasks_run_spread_over_the_msbs_and_answer_on_every_machine(web: LabClient) -> None:

    tasks = web.tasks()
    machines = {m["record"]["machine"]: m["record"] for m in web.ctl("machine", "list")["machines"]}
    per_msb = Counter(
        machines[t["placement"]["machine"]]["location"]["msb"] for t in tasks.values()
    )
    assert len(tasks) == 6
    assert per_msb == {"msb1": 2, "msb2": 2, "msb3": 2}

    endpoints = web.ctl("job", "endpoints", "web")["endpoints"]
    assert {e["machine"] for e in endpoints} == {"m1", "m2", "m3"}
    for endpoint in endpoints:
        page = web.get(f"http://{endpoint['host']}:{endpoint['ports']['http']}/")
        assert page.splitlines() == [
            "Twine demo v1",
            f"machine: {endpoint['machine']}",
            f"task: {endpoint['task']}",
        ]


@pytest.mark.behaviour("AG2")
def test_a_task_is_a_snapshot_a_slice_and_a_transient_unit(web: LabClient) -> None:
    task = web.tasks()[0]
    machine = task["placement"]["machine"]
    unit = "twine-task-web-0.service"
    shown = web.ssh(machine, f"systemctl show {unit} -p Slice,Transient,RootDirectory,MemoryMax")
    assert "Slice=workload-demo.slice" in shown
    assert "Transient=yes" in shown
    assert "RootDirectory=/var/lib/twine/tasks/web-0" in shown
    assert "MemoryMax=50331648" in shown
    assert "web-0" in web.ssh(machine, "btrfs subvolume list -s /var/lib/twine")


@pytest.mark.behaviour("MO9", "RB2")
def test_every_machine_is_free_or_in_one_entitlement(web: LabClient) -> None:
    records = [m["record"] for m in web.ctl("machine", "list")["machines"]]
    held = next(
        e for e in web.ctl("entitlement", "list")["entitlements"] if e["record"]["name"] == "demo"
    )["held"]
    assert sorted(r["machine"] for r in records if r["entitlement"] == "demo") == sorted(held)
    assert all(r["entitlement"] in ("", "demo") for r in records)


@pytest.mark.behaviour("HP1", "HP10", "HP15", "MO11")
def test_the_profile_was_verified_before_a_task_ran(web: LabClient) -> None:
    # HP1 HP10 HP15 MO11: read from the guest's own /proc/sys, not from our records
    for machine in web.machines:
        status = json.loads(web.ssh(machine, "sidekick status -o json"))
        assert status["name"] == "web"
        assert status["state"] == "verified"
        history = json.loads(web.ssh(machine, "sidekick history -o json"))
        proofs = [e["at"] for e in history if (e["name"], e["state"]) == ("web", "verified")]
        tasks = json.loads(web.ssh(machine, "twine-agent ps -o json"))["tasks"]
        assert tasks
        assert proofs
        assert all(t["started_at"] >= min(proofs) for t in tasks)
        assert json.loads(web.ssh(machine, "sidekick verify -o json"))["state"] == "verified"
        facts = json.loads(web.ssh(machine, "sidekick facts -o json"))  # HP10
        assert (facts["location.region"], facts["location.msb"]) == ("lab", f"msb{machine[1:]}")


@pytest.mark.behaviour("AL4")
def test_a_plan_shows_what_a_job_file_would_do(web: LabClient) -> None:
    image = web.job()["record"]["spec"]["image"]
    before = web.tasks()
    words = ("job", "plan", str(JOB), "--set", f"image={image}", "--set", "tasks=9")
    print(web.run("twinectl", *words))
    plan = web.ctl(*words)
    assert (plan["staying"], plan["unplaced"], plan["taken"]) == (6, [], [])
    assert {task["msb"] for task in plan["placed"]} == {"msb1", "msb2", "msb3"}
    assert [b["tasks"] for b in plan["spread"]] == [3, 3, 3]

    with pytest.raises(Failed, match="do not fit on the entitlement's 3 machines"):
        web.ctl(*words[:-1], "tasks=600")
    assert web.ctl("job", "explain", "web")["summary"] == "6 of 6 placed"
    assert web.tasks() == before


def test_resizing_starts_only_missing_tasks_and_stops_only_excess_ones(web: LabClient) -> None:
    before = web.invocations()
    image = web.job()["record"]["spec"]["image"]
    web.apply(image, "tasks=3")
    kept = {f"web-{index}" for index in web.tasks()}
    assert sorted(t["placement"]["machine"] for t in web.tasks().values()) == ["m1", "m2", "m3"]
    web.until("three units are gone", lambda: set(web.invocations()) == kept)
    web.apply(image, "tasks=6")
    web.rest()
    after = web.invocations()
    assert {task: after[task] for task in kept} == {task: before[task] for task in kept}
    assert set(after) == set(before)


@pytest.mark.behaviour("SC8", "SC10", "SD1")
def test_a_rolling_update_causes_no_failed_request(web: LabClient, images: dict[str, str]) -> None:
    # SC8 SC10 SD1: for a client that uses discovery, and for one behind a proxy that uses it
    before = web.invocations()
    clients = [web.traffic(), web.traffic(web.proxy())]
    web.apply(images["v2"])
    for outcome in map(web.outcome, clients):
        print(outcome)
        assert outcome["failed"] == 0, outcome["failures"]
        assert outcome["requests"] > 50
        assert set(outcome["answers"]) == {"Twine demo v1", "Twine demo v2"}
    web.lab("proxy", "stop")
    web.rest()
    assert {t["version"] for t in web.tasks().values()} == {web.job()["record"]["version"]}
    after = web.invocations()
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())


@pytest.mark.behaviour("FE4", "MO8")
def test_a_bad_job_file_gets_all_its_errors_at_once(web: LabClient, tmp_path: Path) -> None:

    before = web.job()
    bad = tmp_path / "bad.toml"
    bad.write_text(
        'name = "web"\nentitlement = "nobody"\ntasks = -1\nimage = "latest"\n'
        'command = []\nreplicas = 3\n[probe]\nport = "http"\n'
    )
    with pytest.raises(Failed) as refused:
        web.run("twinectl", "job", "apply", str(bad))
    assert refused.value.code == 64
    for field in ("tasks", "image", "command", "replicas"):
        assert field in refused.value.stderr
    unknown = tmp_path / "unknown.toml"
    text = (Path(__file__).parents[2] / "vm_lab" / "jobs" / "web.toml").read_text()
    unknown.write_text(text.replace('"demo"', '"nobody"'))
    with pytest.raises(Failed) as refused:
        web.run(
            "twinectl", "job", "apply", str(unknown),
            "--set", f"image={before['record']['spec']['image']}",
        )  # fmt: skip
    assert "nobody" in refused.value.stderr
    assert web.job()["record"]["spec"] == before["record"]["spec"]


def test_logs_come_through_the_control_plane(web: LabClient) -> None:
    endpoint = next(
        e for e in web.ctl("job", "endpoints", "web")["endpoints"] if e["task"] == "web-0"
    )
    web.get(f"http://{endpoint['host']}:{endpoint['ports']['http']}/?canary-4711")
    web.until(
        "the request is in the log",
        lambda: "canary-4711" in web.run("twinectl", "job", "logs", "web", "0", "--tail", "50"),
    )
