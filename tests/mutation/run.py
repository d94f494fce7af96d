"""Draws mutants, has them judged in a copy of the tree, and reports which ones no test notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutation.sites import Mutant, drawn, plant

ROOT = Path(__file__).resolve().parents[2]
Rooms = dict[str, tuple[list[str], list[str]]]
REASONS = Path(__file__).with_name("survivors.toml")
SEEDS = [f"{scenario} {n}" for scenario in ("everything", "composed") for n in range(1, 31)]
"""The simulated seeds that judge mutants which no test noticed."""
WANTED = 0.9
"""The share of mutants that tests and seeds must notice."""
_ENGINE = """apply plan state setting write_order trial look observe unattended history targets
reboot report results status"""
CONTROL, UNIT = "control_plane/", "tests/unit/control_plane/"
ROOMS: Rooms = {
    "health": (
        [CONTROL + "health/**/*.py"],
        [
            UNIT + "health",
            UNIT + "services/test_machine_health.py",
            UNIT + "scheduler/test_limits.py",
            "tests/property/control_plane/test_down_limits.py",
        ],
    ),
    "task control": (
        [CONTROL + "task_control/**/*.py", "taskcontrol/*.py"],
        [
            UNIT + "task_control",
            UNIT + "scheduler/test_task_control.py",
            "tests/unit/taskcontrol",
            "tests/property/taskcontrol",
        ],
    ),
    "ops planner": ([CONTROL + "ops_planner/**/*.py"], [UNIT + "ops_planner"]),
    "agent lifecycle": (
        ["agent/tasks/**/*.py", "agent/lease/**/*.py"],
        [f"tests/unit/agent/{part}" for part in ("tasks", "lease", "host")]
        + ["tests/unit/agent/server/test_agent_cli_inspection.py", "tests/property/agent"],
    ),
    "scheduler": ([CONTROL + "scheduler/**/*.py"], [UNIT + "core", UNIT + "scheduler"]),
    "allocator": ([CONTROL + "allocator/**/*.py"], [UNIT + "core", UNIT + "allocator"]),
    "sidekick": (
        [f"sidekick/{name}.py" for name in _ENGINE.split()],
        ["tests/unit/sidekick", "tests/property/sidekick"],
    ),
}
"""For each room, its modules that are changed and its own tests. In sidekick the engine is changed,
but not its commands and kinds of settings."""
WIDER = [UNIT + "services", UNIT + "job_control", UNIT + "agents", "tests/property/control_plane"]
"""Tests of several rooms. They judge the mutants that the room's own tests did not notice."""


def main(seed: int, count: int, only: list[int], folder: Path) -> int:
    """Judge and print. Return 0 if enough mutants were noticed.

    With `only`, judge those mutants again. Which mutants each test reaches is known from an earlier
    run.
    """
    mutants = drawn(ROOT, {room: globs for room, (globs, _) in ROOMS.items()}, count, seed)
    if not only:
        shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    wanted = [m for m in mutants if not only or m.number in only]
    if not judged(folder, mutants, wanted, ROOMS, WIDER, SEEDS):
        print(f"the tests could not judge: see {folder / 'log'}", file=sys.stderr)
        return 2
    rows = rows_of(mutants, folder)
    print(table(rows, tomllib.loads(REASONS.read_text())))
    share = sum(row["outcome"] == "killed" for row in rows) / len(rows)
    print(f"{share:.1%} of {len(rows)} mutants were noticed; {WANTED:.0%} are wanted")
    return 0 if share >= WANTED else 1


def judged(
    folder: Path,
    mutants: list[Mutant],
    wanted: list[Mutant],
    rooms: Rooms,
    wider: list[str],
    seeds: list[str],
) -> bool:
    """Plant all mutants in the tree of a folder and judge those wanted. On False, see its log."""
    plant(folder / "tree", mutants)
    parts = [
        (own, [m.number for m in wanted if m.room == room]) for room, (_, own) in rooms.items()
    ]
    tests = [*(path for own, numbers in parts if numbers for path in own), *wider]
    arguments = [str(folder), json.dumps(parts), json.dumps(seeds), *tests]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutation.judge", *arguments],
            cwd=folder / "tree",
            env={
                **os.environ,
                "PYTHONPATH": f"{folder / 'tree'}:{ROOT}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=log,
            stderr=log,
            check=False,
        )
    return done.returncode == 0


def rows_of(mutants: list[Mutant], folder: Path) -> list[dict[str, Any]]:
    """Return the outcome of each mutant, and write the outcomes as JSON next to the log."""
    outcomes: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        before = outcomes.get(row["number"])
        if before is None or row["outcome"] != "not reached":  # by a later kind of test
            outcomes[row["number"]] = row
    unknown = {"outcome": "not judged", "by": ""}
    rows = [{**asdict(m), "key": m.key, **outcomes.get(m.number, unknown)} for m in mutants]
    (folder / "results.json").write_text(json.dumps(rows, indent=1))
    return rows


def table(rows: list[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Return the noticed mutants by room, and each unnoticed mutant with its known reason."""
    lines = []
    for room in dict.fromkeys(row["room"] for row in rows):
        outcomes = [row["outcome"] for row in rows if row["room"] == room]
        lines.append(f"{room:16} {outcomes.count('killed'):3} of {len(outcomes):3} noticed")
    for row in rows:
        if row["outcome"] != "killed":
            lines.append(
                f"{row['outcome']:11} {row['number']:3} line {row['line']} of {row['key']}"
            )
            lines.append(f"            {reasons.get(row['key'], 'no reason is known')}")
    return "\n".join(lines)
