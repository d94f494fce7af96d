"""`twinectl plan --offline`: the product's allocator on a list of machines, without a control
plane."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control_plane.cli import main

MACHINES = """machine,datacenter,msb,row,rack,machine_type,cpus,memory,rru,gpus,labels
m1,dc1,msb1,r1,k1,web,4,10G,4,0,disk=nvme
m2,dc1,msb2,r1,k1,web,4,10G,4,0,
m3,dc2,msb1,r1,k1,gpu,8,64G,8,4,
"""
JOB = """name = "web"
entitlement = "front"
tasks = 2
image = "sha256:1111111111111111111111111111111111111111111111111111111111111111"
command = ["/bin/server"]
limits = { memory_max_bytes = "2GiB", cpu_max_cores = 1 }
"""
PICKY = JOB.replace("web", "ai").replace("front", "research")
PICKY += 'requires = ["label.disk = nvme or gpus > 1"]'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "machines.csv").write_text(MACHINES)
    (tmp_path / "web.toml").write_text(JOB)
    (tmp_path / "ai.toml").write_text(PICKY)
    return tmp_path


def plan(files: Path, *arguments: str, jobs: tuple[str, ...] = ("web.toml", "ai.toml")) -> Result:
    words = ["plan", "--offline", str(files / "machines.csv"), *arguments]
    return CliRunner().invoke(main, [*words, *(str(files / name) for name in jobs)])


def test_jobs_are_placed_one_after_the_other(files: Path):
    result = plan(files, "-o", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    web, ai = found["jobs"]
    assert len({task["datacenter"] for task in web["placed"]}) == 2
    assert {task["machine"] for task in ai["placed"]} <= {"m1", "m3"}
    assert not {task["machine"] for task in ai["placed"]} & set(web["taken"])
    assert found["used"] == len({*web["taken"], *ai["taken"]})


def test_the_table_shows_where_tasks_are_placed_and_why_others_wait(files: Path):
    (files / "big.toml").write_text(JOB.replace("tasks = 2", "tasks = 40"))
    result = plan(files, jobs=("big.toml",))
    assert result.exit_code == 0, result.output
    assert "job web: 16 of 40 tasks placed, on 3 machines" in result.stdout
    assert "tasks per MSB: dc1/msb1 4, dc1/msb2 4, dc2/msb1 8" in result.stdout
    assert "no room: 3 machines: CPU: 1 cores wanted, at most 0 cores free" in result.stdout
    assert "3 of 3 machines used, 24 tasks without room" in result.stdout


def test_preferences_by_labels_and_weights_are_planned(files: Path):
    requirement = """
[[preferences]]
property = "label.disk"
strategy = "prefer"
values = ["nvme"]
"""
    heavy = """
[[preferences]]
property = "datacenter"
weights = { dc2 = 3 }
"""
    (files / "near.toml").write_text(JOB + requirement)
    (files / "heavy.toml").write_text(JOB.replace("web", "heavy").replace("= 2", "= 8", 1) + heavy)
    result = plan(files, "-o", "json", jobs=("near.toml", "heavy.toml"))
    assert result.exit_code == 0, result.output
    near, many = json.loads(result.stdout)["jobs"]
    assert {task["machine"] for task in near["placed"]} == {"m1"}
    dcs = [task["datacenter"] for task in many["placed"]]
    assert (dcs.count("dc1"), dcs.count("dc2")) == (2, 6)


def test_budgets_of_power_are_planned_with(files: Path):
    (files / "machines.csv").write_text(
        MACHINES.replace("gpus,labels", "gpus,power_w,labels")
        .replace(",4,0,", ",4,0,400,")
        .replace(",8,4,", ",8,4,900,")
    )
    (files / "power.toml").write_text('overcommit = 1.0\n[budgets_w]\n"dc1" = 400\n"dc2" = 1\n')
    (files / "big.toml").write_text(JOB.replace("tasks = 2", "tasks = 40"))
    result = plan(files, "--power", str(files / "power.toml"), jobs=("big.toml",))
    assert result.exit_code == 0, result.output
    assert "power: dc1 has 0 W left of 400 W; another machine draws 400 W" in result.stdout
    assert "power: dc2 has 1 W left of 1 W; another machine draws 900 W" in result.stdout
    (files / "power.toml").write_text('overcommit = 9\n[budgets_w]\n"a/b/c/d/e" = 0\n')
    refused = plan(files, "--power", str(files / "power.toml"), jobs=("big.toml",))
    assert refused.exit_code == 64
    assert "overcommit" in refused.stderr
    assert "expected a number from 1 to 3" in refused.stderr


def test_entitlements_keep_to_their_quotas(files: Path):
    (files / "entitlements.toml").write_text('[front]\nmachines = 1\nmachine_types = ["web"]\n')
    given = str(files / "entitlements.toml")
    result = plan(files, "--entitlements", given, "-o", "json", jobs=("web.toml",))
    (web,) = json.loads(result.stdout)["jobs"]
    assert len(web["taken"]) == 1
    assert set(web["taken"]) <= {"m1", "m2"}


def test_the_errors_of_all_files_are_reported_at_once(files: Path):
    (files / "bad.toml").write_text(
        JOB.replace("tasks = 2", "tasks = -2") + 'requires = ["gpu > 1"]'
    )
    (files / "twin.toml").write_text(JOB)
    result = plan(files, jobs=("bad.toml", "web.toml", "twin.toml"))
    assert result.exit_code == 64
    assert f"{files}/bad.toml: tasks: -2 is not valid" in result.stderr
    assert (
        f"{files}/bad.toml: requires[0]: at character 1: 'gpu' is not a property" in result.stderr
    )
    assert f"{files}/twin.toml: name: 'web' is also the job of {files}/web.toml" in result.stderr
    (files / "machines.csv").write_text("machine,datacenter\nm1,dc1\n")
    assert "columns are missing: msb, row, rack" in plan(files).stderr
    (files / "e.toml").write_text("[front]\nmachines = 0\n[back]\n")
    (files / "machines.csv").write_text(MACHINES)
    refused = plan(files, "--entitlements", str(files / "e.toml")).stderr
    assert "front.machines: a quota of 0 is for entitlements that borrow" in refused
    assert "back.machines: a quota is missing" in refused


@pytest.mark.behaviour("BUG-UX68")
def test_a_job_may_name_its_image(files: Path):
    """Formerly `image = "app:v1"` was refused, although the command reads no image."""
    (files / "web.toml").write_text(JOB.replace("sha256:" + "1" * 64, "app:v1"))
    found = plan(files, jobs=("web.toml",))
    assert (found.exit_code, "2 of 2 tasks placed" in found.output) == (0, True)
    (files / "web.toml").write_text(JOB.replace("sha256:" + "1" * 64, "sha256:12"))
    assert "image: 'sha256:12' is not valid" in plan(files, jobs=("web.toml",)).output
