"""`twinectl job plan` and `job explain`: their output, and that they change nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from control_plane.api.plans import JobExplanation, JobPlan, PlannedTask, SpreadBin
from control_plane.cli import main

from .conftest import CannedPlanner, Region

JOB = """
name = "web"
entitlement = "front"
tasks = 3
image = "sha256:{digest}"
command = ["/bin/serve"]
"""
SPREAD = [
    SpreadBin(datacenter="dc1", msb="msb1", tasks=2),
    SpreadBin(datacenter="dc2", msb="msb3", tasks=1),
]
PLAN = JobPlan(
    job="web",
    wanted=4,
    new_version=True,
    staying=1,
    placed=[
        PlannedTask(task=1, machine="m7", datacenter="dc1", msb="msb1", taken=True),
        PlannedTask(task=2, machine="m8", datacenter="dc2", msb="msb3", moved_from="m1\x1b[31m"),
    ],
    stopped=[5],
    taken=["m7"],
    unplaced=[3],
    reasons=["2 machines: no free ports"],
    spread=SPREAD,
    relaxations=["proc", "raw"],
    exposure=9.4,
    exposure_default=1.2,
)
WAITS = JobExplanation(
    job="web",
    wanted=40,
    placed=37,
    waiting=[37, 38, 39],
    summary="37 of 40 placed; 3 wait: …",
    reasons=[
        "212 machines: memory: 600 MiB wanted, at most 96 MiB free",
        "18 machines: is being taken for maintenance: new fans",
        "12 machines: msb would get 4 tasks > 3",
    ],
    fitting_held=0,
    fitting_free=2,
    spread=SPREAD,
)
Ctl = Callable[..., Result]


@pytest.fixture
def planner(region: Region) -> CannedPlanner:
    planner = region.control_plane.job_planner
    assert isinstance(planner, CannedPlanner)
    planner.planned = PLAN
    whole = JobExplanation(job="whole", wanted=3, placed=3, spread=SPREAD)
    planner.explained = {"web": WAITS, "whole": whole}
    return planner


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str) -> Result:
        environment = {"TWINE_ENDPOINT": f"unix:{region.socket}"}
        return CliRunner().invoke(main, arguments, env=environment)

    return run


@pytest.fixture
def jobfile(tmp_path: Path) -> str:
    path = tmp_path / "web.toml"
    path.write_text(JOB.format(digest="a" * 64))
    return str(path)


@pytest.mark.behaviour("BUG-UX165")
def test_a_plan_lists_what_would_be_placed_and_changes_nothing(
    ctl: Ctl, planner: CannedPlanner, region: Region, jobfile: str
) -> None:
    result = ctl("job", "plan", jobfile, "--set", "tasks=4")
    assert result.exit_code == 0, result.output
    what, *lines = result.stdout.splitlines()
    assert what == "job web: new"
    assert lines[0].split() == ["TASK", "MACHINE", "DATACENTER", "MSB", "WHAT", "MACHINE", "FROM"]
    assert lines[1].split() == ["1", "m7", "dc1", "msb1", "new", "free", "pool"]
    assert lines[2].split()[:6] == ["2", "m8", "dc2", "msb3", "moved", "from"]
    assert "\x1b" not in result.stdout
    assert lines[3:] == [
        "job web: 4 tasks: 2 placed, 1 stay where they are (1 restarted in place), 1 stopped,"
        " 1 without room; 1 machine taken from the free pool",
        "this is the result of the update; its batches, canaries and waits are not simulated",
        "an update chooses machines task by task, so moved tasks may get other ones than these",
        "tasks per MSB: dc1/msb1 2, dc2/msb3 1",
        "  no room: 2 machines: no free ports",
        "sandbox of its tasks: exposure 9.4 of 10, 1.2 without its relaxations: proc, raw;"
        " `raw` requires the role host-admin",
        "nothing was changed; `twinectl job apply` does it",
    ]
    assert [spec.tasks for spec in planner.specs] == [4]
    assert region.control_plane.jobs == {}


@pytest.mark.behaviour("BUG-UX6")
def test_a_plan_begins_with_what_changes_in_the_job(
    ctl: Ctl, planner: CannedPlanner, jobfile: str
) -> None:
    """Each field with both values; `job show` prints the job as a file to apply."""
    assert ctl("entitlement", "create", "front", "--machines", "3").exit_code == 0
    applied = ctl("job", "apply", jobfile)
    assert applied.exit_code == 0, applied.output
    planner.planned = replace(PLAN, wanted=3)
    assert ctl("job", "plan", jobfile).stdout.startswith("job web: no change\n")
    planner.planned = replace(PLAN, wanted=7)
    changed = ctl("job", "plan", jobfile, "--set", "tasks=7", "--set", "update.surge=2")
    lines = changed.stdout.splitlines()
    assert lines[0] == "job web: 2 fields changed:"
    assert lines[1].startswith("  tasks: ")
    assert lines[1].endswith(" -> 7")
    assert lines[2] == "  update.surge: (not set) -> 2"
    shown = ctl("job", "show", "web")
    assert shown.exit_code == 0, shown.output
    again = Path(jobfile).with_name("again.yaml")
    again.write_text(shown.stdout)
    planner.planned = replace(PLAN, wanted=3)
    assert ctl("job", "plan", str(again)).stdout.startswith("job web: no change\n")
    lost = ctl("job", "show", "web", "--version", "77")
    assert lost.exit_code == 3
    assert "has never had a version 77" in lost.stderr
    history = ctl("job", "history", "web")
    assert history.stdout.startswith("version 1 (newest): ")


@pytest.mark.behaviour("BUG-UX61")
def test_a_plan_shows_that_the_size_of_another_writer_is_kept(
    ctl: Ctl, planner: CannedPlanner, jobfile: str
) -> None:
    """Regression: the plan showed the size of the file, and that no task moves."""
    assert ctl("entitlement", "create", "front", "--machines", "3").exit_code == 0
    assert ctl("job", "apply", jobfile).exit_code == 0
    planner.planned = replace(PLAN, wanted=3)
    lines = ctl("job", "plan", jobfile, "--set", "tasks=9").stdout.splitlines()
    assert lines[0] == "job web: no change"
    assert lines[1].startswith("  tasks stay 3, not 9 as in the file: ")
    assert planner.writers == [f"local:{os.getuid()}"]


def test_an_explanation_names_all_reasons(ctl: Ctl, planner: CannedPlanner) -> None:
    assert ctl("job", "explain", "web").stdout.splitlines() == [
        "job web: 37 of 40 placed; 3 wait:",
        *(f"  {reason}" for reason in WAITS.reasons),
        "room for one more task now: 0 machines of the entitlement, 2 free ones",
        "tasks per MSB: dc1/msb1 2, dc2/msb3 1",
    ]
    assert ctl("job", "explain", "whole").stdout.splitlines()[0] == "job whole: 3 of 3 placed"
    missing = ctl("job", "explain", "none")
    assert missing.exit_code == 3
    assert "there is no job none" in missing.stderr


def test_a_permission_that_the_entitlement_lacks_is_named(ctl: Ctl, planner: CannedPlanner) -> None:
    planner.explained["db"] = JobExplanation(
        job="db", wanted=1, placed=1, relaxations=["nested", "own-init"], exposure=5.5
    )
    (line,) = [x for x in ctl("job", "explain", "db").stdout.splitlines() if "sandbox" in x]
    assert line.endswith("; its entitlement has to allow `own-init` and `nested`")


def test_programs_read_both_as_json(ctl: Ctl, planner: CannedPlanner, jobfile: str) -> None:
    plan = json.loads(ctl("job", "plan", jobfile, "-o", "json").stdout)
    assert plan["placed"][0]["machine"] == "m7"
    assert (plan["unplaced"], plan["taken"], plan["new_version"]) == ([3], ["m7"], True)
    explained = json.loads(ctl("job", "explain", "web", "-o", "json").stdout)
    assert explained["waiting"] == [37, 38, 39]
    assert explained["reasons"] == WAITS.reasons


@pytest.mark.behaviour("AG9")
def test_places_of_volumes_and_blocked_starts_are_reported(
    ctl: Ctl, planner: CannedPlanner
) -> None:
    """The plan prints the first ones of very many tasks, and the number of the others."""
    kept = [f"task {n}: data on m{n}" for n in range(60)]
    planner.explained["db"] = JobExplanation(
        job="db",
        wanted=60,
        placed=60,
        volumes=kept,
        image="no task is started: it has no signature",
    )
    lines = ctl("job", "explain", "db").stdout.splitlines()
    assert "no task is started: it has no signature" in lines
    assert "task 49: data on m49" in lines
    assert "task 50: data on m50" not in lines
    assert "… and 10 more (-o json shows all)" in lines
    assert json.loads(ctl("job", "explain", "db", "-o", "json").stdout)["volumes"] == kept
