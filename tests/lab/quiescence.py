"""Finds out whether the lab is at rest: no operation is running, and none is due later.

A `stable` job has only healthy tasks at this moment. The scheduler may still be about to move them:
for an even spread, after the job was quiet for a minute; off a machine that is drained; or back,
when a machine is trusted again. A test that takes such a moment for the final state fails on any
machine that is slower than its author's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_ANSWERS = ("does not answer", "answers")
_FIRST = "proposed"
"""The state of an operation without a `state` field: default values are not printed."""


def unsettled(machines: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[str]:
    """Return the pending changes as text; empty if the lab will stay as it is.

    `machines` is the JSON output of `twinectl machine list`, `jobs` that of `twinectl job status`.
    """
    found = unusable(machines)
    for machine in machines:
        if machine["record"]["entitlement"] and not machine["tasks"]:
            found.append(f"{_name(machine)}: held without a task, it is given back soon")
    for job in jobs:
        reasons = [*_of_job(job), *filter(None, [uneven(machines, job)])]
        found += [f"job {job['record']['name']}: {why}" for why in reasons]
    return found


def unusable(machines: list[dict[str, Any]]) -> list[str]:
    """Return the machines that cannot take tasks, or only for a short time, with the reasons."""
    return [f"{_name(m)}: {why}" for m in machines for why in _of_machine(m)]


def uneven(machines: list[dict[str, Any]], job: dict[str, Any]) -> str:
    """Return the number of tasks on each machine if moving one task would make the spread more
    even.
    """
    counts = Counter({_name(m): 0 for m in machines})
    counts.update(t["placement"]["machine"] for t in job["record"]["tasks"] if t["placement"])
    if max(counts.values()) - min(counts.values()) < 2:
        return ""
    return "unevenly spread: " + ", ".join(f"{n} on {m}" for m, n in sorted(counts.items()))


def _name(machine: dict[str, Any]) -> str:
    return str(machine["record"]["machine"])


def _of_machine(machine: dict[str, Any]) -> list[str]:
    record, found = machine["record"], []
    if record["state"] != "up" or not machine["ready"]:
        found.append(f"{record['state']}, its agent {_ANSWERS[machine['ready']]}")
    if machine["health"]:
        found.append(machine["health"])
    proved = record["profile"] if record["profile_state"] == "verified" else None
    if record["entitlement"] and proved != record["profile_wanted"]:
        found.append(f"profile {record['profile_wanted']}: {record['profile_state']}")
    for event in record["unavailability"]:
        if event["end"] is None:
            found.append(f"{event['kind']}: {event['reason']}")
    if record["hold"]:
        found.append(f"held for transaction {record['hold']['transaction']}")
    if record["loan"]:
        found.append("lent")
    return found


def _of_job(job: dict[str, Any]) -> list[str]:
    record, found = job["record"], []
    if job["phase"] != "stable":
        found.append(f"{job['phase']}, {job['healthy']} of {job['wanted']} healthy")
    if job["detail"]:
        found.append(job["detail"])
    for task in record["tasks"]:
        if (operation := task["operation"]) is not None:
            found.append(
                f"task {task['index']}: {operation['kind']} is {operation.get('state', _FIRST)}"
            )
    for machine, tasks in record["leaving"].items():
        found.append(f"{', '.join(tasks)} must still go from {machine}")
    return found
