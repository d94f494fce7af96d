"""Which component may write what: each record has one owner, and only brokers change machines.

The tests read the source without running it. An import or a call that is added elsewhere fails
here.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import control_plane
from control_plane.api.routes import ROUTES
from control_plane.store import records

ROOT = Path(control_plane.__file__).parent
RECORDS = "control_plane.store.records"
KEYS = {
    "task_chunk_key": "TASKS",
    "allocation_key": "ALLOCATIONS",
    "decision_key": "DECISIONS",
    "event_rows": "JOB_EVENTS",
    "event_row_key": "JOB_EVENTS",
    "retired_key": "RETIRED",
}
"""Functions that return keys → the constants of these keys."""
OFFLINE = {"restore_store", "migrate_store", "check_store", "copy_commands"}
"""Commands that open a store that no control plane uses."""
WRITES = {
    "broker": {"assign", "release", "prepare", "commit", "abort", "carry_out"},
    "participants": {"prepare", "commit", "abort"},
    "loans": {"lend", "revoke", "give_back"},
    "outages": {"plan_unavailability", "end_plan"},
    "marks": {"up", "down"},
}
"""Attribute under which an actor keeps a part of the brokers → its calls that change machines."""
OWNERS = {
    "allocator": {"ALLOCATIONS", "DECISIONS"},
    "broker": {"MACHINES", "IMPORTS", "IMPORT_DECISIONS"},
    "discovery": {"SHARDS"},
    "elastic": {"FREED", "PROMISES", "USE_HISTORIES"},
    "identity": {"GROUPS", "HOST_ADMINS", "OPERATORS", "REVOKED"},
    "ops_planner": {"PLANS", "WAVES"},
    "optimus": {"WORK"},
    "portal": {"ENTITLEMENTS", "REQUESTS", "USES"},
    "profiles": {"PROFILES", "ROLLOUTS"},
    "rebalancer": {"REBALANCE"},
    "runtime": {"JOBS", "TASKS", "CLOCK"},
    "scheduler": {"JOB_EVENTS", "GONE_JOBS", "RETIRED", "RESTORED", "USES"},
    "shard_processes": {"JOBS"},
    "shards": {"OWNERSHIPS", "RELEASES", "PROCESSES"},
}
"""Room → records that it names. Jobs are one table, which scheduler and job control share
(`runtime/job_table.py`). A shard that releases an entitlement compares them. With `USES`, a job and
the deletion of its entitlement exclude each other."""


@cache
def modules() -> list[tuple[str, Path, ast.Module]]:
    """Return the room, the path and the syntax tree of each module of the control plane."""
    paths = sorted(ROOT.rglob("*.py"))
    rooms = [path.relative_to(ROOT).parts[0].removesuffix(".py") for path in paths]
    return [
        (room, path, ast.parse(path.read_text()))
        for room, path in zip(rooms, paths, strict=True)
        if room not in OFFLINE | {"store", "api"}
    ]


def keys() -> set[str]:
    """Return the names of all keys and prefixes of records."""
    named = vars(records).items()
    return {name for name, value in named if name[0].isupper() and isinstance(value, str)}


@pytest.mark.behaviour("SH6", "SH16", "WH6")
def test_each_component_names_only_its_records() -> None:
    """The scheduler names no machine, the ReBalancer no job, no broker a task."""
    found = defaultdict(set)
    for room, path, tree in modules():
        if path.name == "standalone.py":
            continue  # an allocator without a control plane has its own portal
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == RECORDS:
                named = {KEYS.get(alias.name, alias.name) for alias in node.names}
                found[room] |= named & keys()
    assert {room: names for room, names in found.items() if names} == OWNERS
    assert keys() - {"QUARANTINE"} == set().union(*OWNERS.values())


@pytest.mark.behaviour("SH6")
def test_no_component_writes_a_record_by_its_text() -> None:
    """A literal key would pass the test above. Each key has one constant."""
    texts = {getattr(records, name) for name in keys()}
    spelled = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room, path, tree in modules()
        if room not in ("cli", "web", "front_end")  # paths of requests begin with the same words
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in texts and "/" in str(node.value)
    ]
    assert spelled == []


@pytest.mark.behaviour("SH16", "WH6")
def test_machines_change_hands_by_the_allocator_and_by_loans_alone() -> None:
    """Scheduler and ReBalancer call no method of the brokers that writes.

    Health and profiles report the state of hosts to the brokers, and the ops planner announces
    planned work. Operators' requests use `broker/service.py`, which is a part of the brokers.
    """
    calls = defaultdict(set)
    for room, _, tree in modules():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            if node.func.attr in WRITES.get(called, ()):
                calls[room].add(node.func.attr)
    assert calls.pop("broker")
    assert calls == {
        "allocator": {"prepare", "commit", "abort", "release"},
        "elastic": {"lend", "revoke"},
        "health": {"carry_out", "up", "down"},
        "ops_planner": {"plan_unavailability", "end_plan"},
        "profiles": {"carry_out"},
    }


@pytest.mark.behaviour("WH6")
def test_an_application_s_controller_may_call_nothing_of_the_control_plane() -> None:
    """A controller is called and answers. It may change only its own work."""
    assert {role for route in ROUTES for role in route.roles} == {"anyone", "component", "host"}
