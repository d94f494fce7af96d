"""Every request of a job about machines, from its file to the machine or to the reason.

Each row is one kind of request: its text in the file, and the machines that its tasks get. For a
request that no machine meets, the row has the reason that users see.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from control_plane.cli import main

MACHINES = """\
machine,datacenter,msb,row,rack,machine_type,cpus,memory,rru,disk,network_mbps,gpus,gpu_type,labels
m1,dc1,msb1,r1,k1,web,8,40G,8,100G,1000,0,,disk=nvme
m2,dc1,msb2,r1,k2,web,8,40G,8,2T,10000,0,,disk=hdd
g1,dc1,msb1,r2,k3,gpu,8,40G,8,100G,10000,4,a100,gpu-link=nvlink
g2,dc1,msb2,r2,k4,gpu,8,40G,8,100G,10000,4,l4,
"""
JOB = """\
name = "{name}"
entitlement = "front"
tasks = {tasks}
image = "sha256:1111111111111111111111111111111111111111111111111111111111111111"
command = ["/bin/server"]
limits = {{ memory_max_bytes = "1GiB", cpu_max_cores = {cores} }}
{request}
"""
EACH = '[[preferences]]\nproperty = "machine"\n'
NO_GPU = "requires = ['gpus < 1']\n"
BY_DISK = '[[preferences]]\nproperty = "label.disk"\n'


def planned(folder: Path, *jobs: tuple[str, int, str], cores: float = 0.5) -> list[dict]:
    """Return the output of `plan --offline` for jobs: name, tasks, other text of the file."""
    (folder / "machines.csv").write_text(MACHINES)
    files = []
    for name, tasks, lines in jobs:
        files.append(folder / f"{name}.toml")
        files[-1].write_text(JOB.format(name=name, tasks=tasks, request=lines, cores=cores))
    words = ["plan", "--offline", str(folder / "machines.csv"), "-o", "json", *map(str, files)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["jobs"]


def on(job: dict) -> dict[str, int]:
    """Return the tasks of a job by machine."""
    names = [task["machine"] for task in job["placed"]]
    return {name: names.count(name) for name in sorted(set(names))}


@pytest.mark.parametrize(
    ("lines", "tasks", "found"),
    [
        ('disk_bytes = "500GiB"', 3, {"m2": 3}),
        ("network_mbps = 5000\nmachine_types = ['web']", 2, {"m2": 2}),
        ("gpus = 4\nrequires = ['gpu_type = a100']", 1, {"g1": 1}),
        ("gpus = 0.5\nrequires = ['gpu_type = l4']", 8, {"g2": 8}),
        ("gpus = 2\nrequires = ['label.gpu-link = nvlink']", 2, {"g1": 2}),
        ("requires = ['label.disk exists and memory > 8GiB']\n" + EACH, 2, {"m1": 1, "m2": 1}),
        ("requires = ['label.disk = hdd or gpu_type = l4']\n" + EACH, 2, {"g2": 1, "m2": 1}),
        ("requires = ['machine_type not in (gpu)', 'label.disk != hdd']", 2, {"m1": 2}),
        ("requires = ['machine = g2 because \"its licence is there\"']", 2, {"g2": 2}),
        ("requires = ['gpus < 1', 'machine not in (m1) because \"ticket 812\"']", 2, {"m2": 2}),
        (NO_GPU + EACH + "at_most = 1", 2, {"m1": 1, "m2": 1}),
        (
            "requires = ['gpus < 1']\n" + EACH.replace("machine", "label.disk"),
            4,
            {"m1": 2, "m2": 2},
        ),
        ("fit = 'tight'\nmachine_types = ['web']\npreferences = []", 4, None),
    ],
)
def test_requirements_of_a_job_file_decide_where_its_tasks_are(tmp_path, lines, tasks, found):
    [job] = planned(tmp_path, ("web", tasks, lines))
    if found is None:
        assert len(on(job)) == 1, "fewest machines"
    else:
        assert on(job) == found
    assert not job["unplaced"]


@pytest.mark.parametrize(
    ("lines", "tasks", "placed", "reason"),
    [
        ('disk_bytes = "9TiB"', 1, 0, "disk: 9437184 MiB wanted"),
        ("gpus = 8", 1, 0, "GPUs: 8 wanted, at most 4 free"),
        ("gpus = 0.5", 17, 16, "GPUs: 0.5 wanted, at most 0 free"),
        ("network_mbps = 20000", 1, 0, "network: 20000 Mbit/s wanted, at most 10000 free"),
        ("requires = ['label.disk = tape']", 1, 0, "requirement not met: label.disk = tape"),
        ("requires = ['machine = m9 because \"it is near\"']", 1, 0, 'because "it is near"'),
        (EACH + "at_most = 1", 5, 4, "machine would get 2 tasks > 1"),
        ("admission = 'gang'\ngpus = 4", 3, 0, "all or nothing was requested, and 1 lack room"),
        ("cpus = 9", 1, 0, "CPU: 9 cores wanted, at most 8 cores free"),
    ],
)
def test_a_requirement_that_no_machine_meets_is_reported(tmp_path, lines, tasks, placed, reason):
    [job] = planned(tmp_path, ("web", tasks, lines))
    assert len(job["placed"]) == placed
    assert len(job["unplaced"]) == tasks - placed
    assert reason in "; ".join(job["reasons"])


def test_jobs_are_placed_apart_or_together_as_their_files_require(tmp_path):
    db = ("db", 1, "requires = ['machine = m1']")
    apart = ("apart", 3, "apart_from = [{ job = 'db', property = 'msb' }]")
    near = ("near", 2, "together_with = [{ job = 'db', property = 'rack' }]")
    lonely = ("lonely", 1, "together_with = [{ job = 'absent' }]")
    _, off, by, alone = planned(tmp_path, db, apart, near, lonely)
    assert set(on(off)) <= {"m2", "g2"}
    assert on(by) == {"m1": 2}
    assert alone["unplaced"]
    assert "not in the machine of a task of absent" in "; ".join(alone["reasons"])
